"""The operations between matrix products, as a set that a model is built with: `prl_models.kernels` chooses one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ops(Protocol):
    """Every implementation computes the same in the same places of precision as transformers' own modules do.

    Weights may be float32 where activations are not: an operation rounds them to the precision of the activations,
    and gives their gradient in their own.
    """

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H] -> weight * x / rms(x), the root in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def qkv_norm_rope(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm over each head of q and k where there are weights [D], then rotation by halves of the first 2 R of its
        D dimensions. qkv [T, (heads + 2 kv_heads) D] (q, then k, then v), cos and sin [T, R] -> q [T, heads, D], k and
        v [T, kv_heads, D]; v may be a view of `qkv`. The gradient of `qkv` is written once, as one tensor."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] (gate, then up) -> silu(gate) * up, [T, I]."""
        ...
