"""The operations between matrix products, as a set that a model is built with: `prl_models.kernels` chooses one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ops(Protocol):
    """Every implementation computes the same in the same places of precision as transformers' own modules do."""

    name: str

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

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] (gate, then up) -> silu(gate) * up, [T, I]."""
        ...
