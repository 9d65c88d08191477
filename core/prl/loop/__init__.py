"""The asynchronous loop: five loops that run at their own pace under one supervisor.

    tasks -> [generate] -> finished groups -> [score] -> pool -> [batch] -> batches -> [train] -> refs -> [publish]
                 ^                                         |         |                                      |
                 +------------ redraws, retries -----------+         +-- staleness gate      engine version +
                 +--------------------- admission: how many groups may be outstanding ----------------------+

What each consumes, waits for, is unblocked by, and produces stands in its own module. They share one `LoopState` and
one `Signal`: whoever changes the state notifies, whoever waits looks again. The rules that decide (`schedule`,
`ledger`) are pure and know nothing of tasks or time. Nothing here imports torch or opens a sample's body.
"""
