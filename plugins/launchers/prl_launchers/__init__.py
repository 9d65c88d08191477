"""Launchers: they execute a plan. `local` runs it on this machine.

* `plugin`, `config`: the declaration.
* `local`: the plan's life: start, watch, restart, scale, stop. `process`: one child process. `slots`: one replica over
  all its starts. `link`: telling the controller, and hearing how many replicas it wants.
* `variables`: what a child finds in its environment (threads, GPUs, no secrets where code is not ours).
* `child` and `warden`: tiny programs that make sure nothing outlives the launcher. `causes`: why it failed.
"""
