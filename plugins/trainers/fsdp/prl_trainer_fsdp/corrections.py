"""Corrections for tokens to which trainer and engine give different probabilities.

With r = p_trainer / p_engine of a sampled token, without gradient, and a limit C > 1, the `rl` weight of a token is
multiplied by a factor:

    truncate        min(1, C / r)                  a loss that multiplies by r then multiplies by min(r, C)
    mask_tokens     1 where 1/C <= r <= C, else 0
    mask_sequences  1 where 1/C <= g <= C, else 0  g: geometric mean of r over the trained tokens of the document

* truncate is truncated importance sampling: Ionides 2008 ("Truncated Importance Sampling", J. Comput. Graph. Stat. 17);
  Espeholt et al. 2018 (IMPALA, arXiv 1802.01561, section 4.1) truncate the weight of every action so; Yao et al. 2025
  ("Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", a blog article) use it for the difference
  of engine and trainer. A token that the trainer finds less probable than the engine keeps its weight.
* mask_tokens leaves out what is off in either direction, as IcePop does (Ling team 2025, "Small Leak Can Sink a Great
  Ship", a blog article): such tokens are most often noise of a mixture's router, and a bounded weight still learns it.
* mask_sequences leaves out whole documents, as masked importance sampling at the level of sequences does (Liu et al.
  2025, "When Speed Kills Stability", a blog article), here by the ratio that GSPO uses, normalised by length (Zheng et
  al. 2025, arXiv 2507.18071, section 4.1), so that one limit serves short and long documents.

Denominators stay as they are: what is left out counts as a token that teaches nothing. Other components keep their
weights. r is the whole ratio, so it also bounds what tokens of older versions may weigh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prl.loss import LossInputs
from prl.messages import Correction

NONE = Correction()

_MAX_LOG_RATIO = 20.0
"""A mean with larger ones would say nothing of the others: e^20 is 5e8."""


@dataclass(frozen=True)
class Corrected:
    """What the loss is given of a row, and what was done to it.

    Args:
        metrics: name to (sum, count) over the trained tokens, as a loss reports them; empty without a correction.
        ratio_max: f64 scalar: the largest r of the row, 0 without a trained token or a correction.
    """

    inputs: LossInputs
    metrics: dict[str, tuple[Tensor | float, Tensor | float]]
    ratio_max: Tensor | float


def correct(inputs: LossInputs, correction: Correction) -> Corrected:
    """Weigh the `rl` tokens of one row, which must be whole documents."""
    if correction.kind == "none":
        return Corrected(inputs, {}, 0.0)
    with torch.no_grad():
        trained = inputs.sampled & (inputs.rl_weights != 0)
        difference = torch.where(trained, inputs.logprobs.double() - inputs.sampler_logprobs.double(), 0.0)
        factor = _FACTORS[correction.kind](difference, math.log(correction.clip), trained, inputs.cu_seqlens)
        factor = torch.where(trained, factor, 1.0)
        ratio = torch.where(trained, difference.clamp(max=_MAX_LOG_RATIO).exp(), 0.0)
        count = trained.sum()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "share": ((factor != 1.0).sum(), count),
            "weight": (torch.where(trained, factor, 0.0).sum(), count),
            "ratio_mean": (ratio.sum(), count),
        }
        weights = inputs.rl_weights * factor.to(inputs.rl_weights.dtype)
        return Corrected(replace(inputs, rl_weights=weights), metrics, ratio.max())


def _truncate(difference: Tensor, limit: float, trained: Tensor, cu_seqlens: Tensor) -> Tensor:
    return (limit - difference).clamp(max=0.0).exp()


def _mask_tokens(difference: Tensor, limit: float, trained: Tensor, cu_seqlens: Tensor) -> Tensor:
    return _within(difference, limit)


def _mask_sequences(difference: Tensor, limit: float, trained: Tensor, cu_seqlens: Tensor) -> Tensor:
    documents = len(cu_seqlens) - 1
    at = torch.arange(len(difference), device=difference.device, dtype=cu_seqlens.dtype)
    document = torch.bucketize(at, cu_seqlens[1:], right=True)
    sums = difference.new_zeros(documents).index_add(0, document, difference)
    counts = difference.new_zeros(documents).index_add(0, document, trained.to(difference.dtype))
    return _within(sums / counts.clamp(min=1.0), limit).index_select(0, document)


def _within(difference: Tensor, limit: float) -> Tensor:
    """1 inside the band and for what is not a number, which must reach the gradient's check and not vanish."""
    return (~(difference.abs() > limit)).to(difference.dtype)


_FACTORS: dict[str, Callable[[Tensor, float, Tensor, Tensor], Tensor]] = {
    "truncate": _truncate,
    "mask_tokens": _mask_tokens,
    "mask_sequences": _mask_sequences,
}
"""From log r f64[T], 0 where it is not trained: the factor f64[T]."""
