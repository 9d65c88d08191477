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

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Norm over each head where there is a weight [D], then rotation of the first 2 * cos.shape[-1] dimensions by
        halves. q [T, heads, D], k [T, kv_heads, D] (views of one tensor are fine), cos and sin [T, R / 2]."""
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
        """`qk_norm_rope` on one fused product: qkv [T, (heads + 2 kv_heads) D] (q, then k, then v) -> q [T, heads, D],
        k and v [T, kv_heads, D]; v may be a view of `qkv`. The gradient of `qkv` is written once, as one tensor."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] (gate, then up) -> silu(gate) * up, [T, I]."""
        ...
