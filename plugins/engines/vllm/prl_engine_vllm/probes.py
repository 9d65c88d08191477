"""Comparing what the engine computes with what the trainer says it must.

The trainer's probes are scored as ordinary requests, before every other in the queue. So what is checked is what
generates: the same batches, kernels, shards and quantisation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prl.errors import WeightsError
from prl.protocols import Probe
from prl_engine_vllm.gate import Gate

QUANTISED_FACTOR, QUANTISED_LEAST = 2.0, 0.3
"""What the trainer's tolerance becomes where the engine quantises what it receives: so many times it, and at least so
much. Sixteen bits alone are allowed 0.15 and more; eight are farther from the trainer without anything being wrong."""


async def check(gate: Gate, probes: Sequence[Probe], tolerance: float, *, ranks: int = 1, lora: Any = None) -> float:
    """Score the probes on every data-parallel rank; the largest mean |difference| of log-probabilities.

    Raises:
        WeightsError: it is more than `tolerance`, or not a number.
    """
    if not probes:
        return 0.0
    sequences = [probe.token_ids for probe in probes]
    each = range(ranks) if ranks > 1 else [None]
    scored = await asyncio.gather(*(gate.score(sequences, rank=rank, lora=lora) for rank in each))
    worst = 0.0
    for rank, found in enumerate(scored):
        mean, count = difference(probes, found)
        if not mean <= tolerance:  # also true for NaN
            where = f" on data-parallel rank {rank}" if ranks > 1 else ""
            raise WeightsError(
                f"the probes do not agree after installing{where}: mean |difference| of log-probabilities {mean:.3g} "
                f"over {count} tokens, allowed is {tolerance:g}. If the engine computes in a coarser precision than "
                "the trainer, raise mismatch.probe_tolerance"
            )
        worst = max(worst, mean)
    return worst


def difference(probes: Sequence[Probe], scored: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Mean |difference| of log-probabilities and over how many tokens; a sequence's first one is not counted."""
    total, count = 0.0, 0
    for probe, logprobs in zip(probes, scored, strict=True):
        for ours, theirs in zip(logprobs[1:], probe.logprobs[1:], strict=True):
            total += abs(ours - theirs)
            count += 1
    return total / max(count, 1), count


def allowed(tolerance: float, *, quantised: bool) -> float:
    """The tolerance that came with the weights, as it is for this engine."""
    return max(QUANTISED_FACTOR * tolerance, QUANTISED_LEAST) if quantised else tolerance
