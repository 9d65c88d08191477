"""Comparing what an engine computes with new weights with what the trainer says it must.

An engine scores the trainer's probes as it scores anything else, and `check` judges what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prl.errors import WeightsError
from prl.messages import Installed
from prl.protocols import Probe

MAX_DIFFERENCE = 20.0
"""Larger differences of log-probabilities count as this one in `k3`: e^20 is 5e8, and a sum of such stays finite."""


def k3(difference: float) -> float:
    """e^d - 1 - d of d = trainer minus engine log-probability: its mean over tokens that the engine sampled estimates
    KL(engine || trainer) (Schulman, "Approximating KL divergence", 2020). `mismatch/kl` of training is the same."""
    bounded = max(-MAX_DIFFERENCE, min(MAX_DIFFERENCE, difference))
    return math.expm1(bounded) - bounded


def check(probes: Sequence[Probe], scored: Sequence[Sequence[float]], tolerance: float, where: str = "") -> Installed:
    """Compare `scored`, the engine's log-probabilities of every probe, with the trainer's. A sequence's first token has
    none and is not counted.

    Raises:
        WeightsError: the mean absolute difference is more than `tolerance`, or not a number.
    """
    total, count, kl, sampled = 0.0, 0, 0.0, 0
    for probe, logprobs in zip(probes, scored, strict=True):
        pairs = zip(logprobs[1:], probe.logprobs[1:], strict=True)
        for position, (ours, theirs) in enumerate(pairs, start=1):
            total += abs(ours - theirs)
            count += 1
            if position >= probe.first:
                kl += k3(theirs - ours)
                sampled += 1
    difference = total / max(count, 1)
    if not difference <= tolerance:  # also true for NaN
        raise WeightsError(
            f"the probes do not agree after installing{where}: mean |difference| of log-probabilities {difference:.3g} "
            f"over {count} tokens, allowed is {tolerance:g}. If the engine computes in a coarser precision than the "
            "trainer, raise mismatch.probe_tolerance"
        )
    return Installed(sampled, kl / max(sampled, 1), difference)


def pooled(found: Sequence[Installed]) -> Installed:
    """What several ranks found, as one: every token counts the same. Ranks score the same probes."""
    tokens = sum(one.probe_tokens for one in found)
    return Installed(
        tokens,
        sum(one.probe_tokens * one.probe_kl for one in found) / max(tokens, 1),
        sum(one.probe_difference for one in found) / max(len(found), 1),
    )


def worst(found: Sequence[Installed]) -> Installed:
    """What several engines found: the largest figures, and the tokens of the one with the largest KL."""
    if not found:
        return Installed()
    largest = max(found, key=lambda one: one.probe_kl)
    difference = max(one.probe_difference for one in found)
    return Installed(largest.probe_tokens, largest.probe_kl, difference)
