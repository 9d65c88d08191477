"""Weights of several layers as one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[out_i, in] each, one below the other, in `dtype`: cast and joined in one pass. A single one that has the
    precision already is not copied.

    Functions with a backward pass of their own join again there: matrices kept from the forward pass would be a second
    model in memory, and would outlive what FSDP frees after each block.
    """
    if len(weights) == 1:
        return weights[0].to(dtype)
    rows = [len(weight) for weight in weights]
    out = weights[0].new_empty(sum(rows), weights[0].shape[1], dtype=dtype)
    for part, weight in zip(out.split(rows), weights, strict=True):
        part.copy_(weight)
    return out
