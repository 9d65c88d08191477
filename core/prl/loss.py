"""The seam between a trainer and a loss plugin (`prl.losses`): what a loss is given and what it returns.

The core never imports torch: tensors appear here in annotations only.

One call sees one packed row of T tokens. Index t is a token of the row, and everything at t speaks about *that*
token: `logprobs[t]` was computed from the logits at t-1. The first token of a document has no log-probability
(0, without gradient) and every weight stream is 0 there.

The loss of an update (an optimiser step: usually the whole step, a part of it with `trainer.updates_per_batch`) is the
sum over its rows (all micro-batches of all ranks) of what the loss plugin returns:

    L = sum over components c of  sum_t w_c[t] * l_c[t] / denominators[c]

Denominators are of the whole update, so a loss never averages, and packing or sharding cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One packed row. All tensors are [T], on one device, and without gradient unless it is said.

    Args:
        logprobs: f32, with gradient: the trainer's log-probability of each token, at the temperature it was
            sampled with.
        entropy: f32, with gradient: entropy in nats of the distribution each token was drawn from, same temperature.
        sampler_logprobs: f32: what the engine said when it sampled the token; 0 where `sampled` is false.
        advantages: f32.
        rl_weights, ce_weights, ref_kl_weights: f32: the three component weight streams; 0 is "not trained".
        sampled: bool: the token came from the policy (not from a prompt or a tool).
        versions: i32: the policy version that sampled the token; -1 where `sampled` is false.
        cu_seqlens: i32[documents + 1]: bounds of the documents in the row.
        version: the trainer's policy version before this step; `versions == version` is exactly on-policy, in the
            first update of the step.
        denominators: of the whole update over all ranks, by component ("rl", "ce", "ref_kl"); never 0.
    """

    logprobs: Tensor
    entropy: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    rl_weights: Tensor
    ce_weights: Tensor
    ref_kl_weights: Tensor
    sampled: Tensor
    versions: Tensor
    cu_seqlens: Tensor
    version: int
    denominators: dict[str, float]


@dataclass(frozen=True)
class LossOutputs:
    """What one row contributes.

    Args:
        loss: f32 scalar with gradient, already divided by the denominators; rows are summed.
        metrics: name to (sum, count), scalars without gradient (tensors, so that no device has to wait, or floats).
            Both are summed over rows and ranks before the division, so a mean is a mean over all tokens of the step.
    """

    loss: Tensor
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


class Loss(Protocol):
    """What a `prl.losses` factory returns. It is called once per packed row and keeps no state between calls."""

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...
