"""The seam of attention kernels: forward and backward as functions of tensors, so that a caller may keep, merge or
exchange what is between them (recomputation keeps `out` and `lse`; ring attention merges parts by `lse`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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

    @cached_property
    def pairs(self) -> list[tuple[slice, slice]]:
        """The stretches of each pair, on the host, without pairs that have no queries or no keys."""
        queries, keys = self.cu_q.tolist(), self.cu_k.tolist()
        pairs = [(slice(*queries[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(queries) - 1)]
        return [(q, k) for q, k in pairs if q.start < q.stop and k.start < k.stop]


class AttentionKernel(Protocol):
    """softmax(scale q k^T) v within every pair of stretches. With `causal` the last query sees the last key, each
    earlier one a key less. `window`: at most this many keys back, its own included; None: all."""

    @property
    def name(self) -> str: ...

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
