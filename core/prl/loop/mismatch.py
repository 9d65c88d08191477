"""The mismatch gate in training: trainer and engine must compute the same probabilities.

Only tokens whose version is the trainer's own are compared; older ones differ because the policy moved, which the
trainer reports apart as drift. The other half of the gate, the probes of every publish, is the engine's: it refuses
weights with which it does not reproduce them. What it found is reported beside, for every version that was installed:
a step may have no token of the trainer's own version, in a run that samples ahead of it.
"""

from __future__ import annotations

import msgspec

from prl.errors import RunFailed
from prl.loop.state import LoopState
from prl.messages import Installed, TrainReport

METRIC = "mismatch/kl"
"""Mean over those tokens of the k3 estimator exp(d) - 1 - d with d = trainer minus engine log-probability
(Schulman, "Approximating KL divergence", 2020)."""
LIMITS = {"float32": 1e-3, "bfloat16": 0.015}
"""Healthy pairs of vLLM and transformers show 3e-9 in float32 and 2e-3 in bfloat16; a wrong install 0.3 and more."""
MIN_TOKENS = 256
"""A mean over fewer says little: one token with d = 2 in fifty is 0.09. Steps are then judged together, as many as have
so many tokens. An asynchronous run trains few of its own version."""


def probe_metrics(installed: Installed) -> dict[str, float]:
    """What the engines found of the probes of a version, under the names of metrics: of the step that made it. Empty
    where the policy had sampled none of them: before the first step they are random, which says nothing of a KL."""
    if not installed.probe_tokens:
        return {}
    return {f"mismatch/{name}": float(value) for name, value in msgspec.structs.asdict(installed).items()}


def check_mismatch(state: LoopState, report: TrainReport) -> None:
    """Warn, pause, stop or correct when the mismatch KL is past its limit.

    Raises:
        RunFailed: it is, and `mismatch.action` is "stop".
    """
    kl = _mean(state, report)
    limit = state.config.mismatch.max_kl or LIMITS[state.config.model.dtype]
    if kl is not None and not kl <= limit:  # not a number is past every limit
        _act(state, report.step, kl, limit)


def _mean(state: LoopState, report: TrainReport) -> float | None:
    """Of the tokens since the last verdict; None while they are too few for one."""
    kl = report.metrics.get(METRIC)
    if kl is None:
        return None
    tokens = report.metrics.get("mismatch/tokens", MIN_TOKENS)
    state.mismatch_sum += kl * tokens
    state.mismatch_tokens += tokens
    if state.mismatch_tokens < MIN_TOKENS:
        return None
    mean = state.mismatch_sum / state.mismatch_tokens
    state.mismatch_sum = state.mismatch_tokens = 0.0
    return mean


def _act(state: LoopState, step: int, kl: float, limit: float) -> None:
    table = state.config.mismatch
    reason = (
        f"step {step}: the mismatch KL between trainer and engine is {kl:.3g}, past mismatch.max_kl = {limit:g}: they "
        "do not compute the same probabilities (precision, attention or a wrong install)"
    )
    state.sink.event("mismatch", step=step, kl=kl, limit=limit, action=table.action)
    if table.action == "stop":
        raise RunFailed(reason, log="logs/engine-0.log")
    if table.action == "pause":
        state.paused = f"{reason}; `prl resume` goes on"
    elif table.action == "correct" and not state.correcting:
        state.correcting = True
        state.sink.event("correction", step=step, correction=table.correction, clip=table.band, reason=reason)
