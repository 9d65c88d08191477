"""Comparing what the engine computes with what the trainer says it must.

The trainer's probes are scored as ordinary requests, before every other in the queue. So what is checked is what
generates: the same batches, kernels, shards and quantisation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prl.engine import probes as compared
from prl.messages import Installed
from prl.protocols import Probe
from prl_engine_vllm.gate import Gate

QUANTISED_FACTOR, QUANTISED_LEAST = 2.0, 0.3
"""What the trainer's tolerance becomes where the engine quantises what it receives: so many times it, and at least so
much. Sixteen bits alone are allowed 0.15 and more; eight are farther from the trainer without anything being wrong."""


async def check(
    gate: Gate, probes: Sequence[Probe], tolerance: float, *, ranks: int = 1, lora: Any = None
) -> Installed:
    """Score the probes on every data-parallel rank, each of which has to agree.

    Raises:
        WeightsError: one does not: see `prl.engine.probes.check`.
    """
    if not probes:
        return Installed()
    sequences = [probe.token_ids for probe in probes]
    each = range(ranks) if ranks > 1 else [None]
    scored = await asyncio.gather(*(gate.score(sequences, rank=rank, lora=lora) for rank in each))
    places = [f" on data-parallel rank {rank}" if ranks > 1 else "" for rank in range(len(scored))]
    return compared.pooled(
        [compared.check(probes, found, tolerance, place) for found, place in zip(scored, places, strict=True)]
    )


def allowed(tolerance: float, *, quantised: bool) -> float:
    """The tolerance that came with the weights, as it is for this engine."""
    return max(QUANTISED_FACTOR * tolerance, QUANTISED_LEAST) if quantised else tolerance
