"""The seam of attention kernels: forward and backward as functions of tensors, so that a caller may keep, merge or
exchange what is between them (recomputation keeps `out` and `lse`; ring attention merges parts by `lse`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """S pairs of a stretch of queries and the stretch of keys that it sees.

    Args:
        cu_q, cu_k: i32[S + 1] on the device: bounds of the stretches, ascending from 0.
        max_q, max_k: longest stretch of each.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class AttentionKernel(Protocol):
    """softmax(scale q k^T) v within every pair of stretches. With `causal` the last query sees the last key, each
    earlier one a key less. `window`: at most this many keys back, its own included; None: all."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """q [Q, heads, D], k and v [K, kv_heads, D] -> out [Q, heads, D] and lse f32[Q, heads], the logarithm of the
        sum of exponentials of each query's scores, -inf where a query sees nothing."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spans: Spans,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. `out` and `lse` may be those of more keys than these (a part of a ring)."""
        ...
