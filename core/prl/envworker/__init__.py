"""The process that runs an environment: `python -m prl.envworker RUN_DIR LABEL REPLICA`.

* `worker`: what it serves (run an episode, cancel one, list tasks) and how an episode's result is checked.
* `context`: what an environment is given: its agents, random numbers, deadline.
* `tasks`: an environment's tasks by index, whatever `Env.tasks` returned.
* `__main__`: the process itself.
"""
