"""For plugin authors and our own tests.

contracts/   what every plugin of a kind must do
fakes, fake_engine   roles for the production loop, and an engine client, without processes or torch
scripted     an episode of an environment with scripted answers
clock        an event loop on virtual time
numerics     agreement of tensors, rows for a loss (the only module with torch)

Failures are injected through `prl.faults`.
"""
