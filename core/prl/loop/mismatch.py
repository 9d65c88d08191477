"""The mismatch gate in training: trainer and engine must compute the same probabilities.

Only tokens whose version is the trainer's own are compared; older ones differ because the policy moved, which the
trainer reports apart as drift. The other half of the gate, the probes of every publish, is the engine's.
"""

from __future__ import annotations

from prl.errors import RunFailed
from prl.loop.state import LoopState
from prl.messages import TrainReport

METRIC = "mismatch/kl"
"""Mean over those tokens of the k3 estimator exp(d) - 1 - d with d = trainer minus engine log-probability
(Schulman, "Approximating KL divergence", 2020)."""


def check_mismatch(state: LoopState, report: TrainReport) -> None:
    """Warn, pause or stop when a step's mismatch KL is past `mismatch.max_kl`.

    Raises:
        RunFailed: it is, and `mismatch.action` is "stop".
    """
    table = state.config.mismatch
    kl = report.metrics.get(METRIC)
    if kl is None or kl <= table.max_kl:
        return
    reason = (
        f"step {report.step}: the mismatch KL between trainer and engine is {kl:.3g}, past mismatch.max_kl = "
        f"{table.max_kl:g}: they do not compute the same probabilities (precision, attention or a wrong install)"
    )
    state.sink.event("mismatch", step=report.step, kl=kl, action=table.action)
    if table.action == "stop":
        raise RunFailed(reason, log="logs/engine-0.log")
    if table.action == "pause":
        state.paused = f"{reason}; `prl resume` goes on"
