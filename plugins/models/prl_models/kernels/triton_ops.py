"""`Ops` of own Triton kernels: CUDA; float32, bfloat16 and float16. Lengths of rows compile nothing anew."""

from __future__ import annotations

from torch import Tensor

from prl_models.kernels import activation, norm, rotary


class TritonOps:
    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps)

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
        return rotary.qkv_norm_rope(qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return activation.swiglu(gate_up)
