"""The asynchronous loop: five loops that run at their own pace under one supervisor.

    tasks -> [generate] -> finished groups -> [score] -> pool -> [batch] -> batches -> [train] -> refs -> [publish]
                 ^                                         |         |                                      |
                 +------------ redraws, retries -----------+         +-- staleness gate      engine version +
                 +--------------------- admission: how many groups may be outstanding ----------------------+

What each consumes, waits for, is unblocked by, and produces stands in its own module. They share one `LoopState` and
one `Signal`: whoever changes the state notifies, whoever waits looks again. The rules that decide (`schedule`,
`ledger`) are pure and know nothing of tasks or time. Nothing here imports torch or opens a sample's body.

supervisor  starts the loops, ends them together
generate, score, batch, train, publish  the five; evaluate is the sixth, and save writes checkpoints beside them
state       what they share; groups: the episodes of one task; waits: who waits for whom
schedule    admission and selection: the staleness guarantee; ledger: what became of every episode
concurrency how many episodes may be in flight, by what the engines say of their caches
episodes    one episode's request and attempts; tasks: where training tasks come from
mismatch    the gate between trainer and engine
snapshot    the controller's part of a checkpoint
"""
