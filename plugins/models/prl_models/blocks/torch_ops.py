"""`Ops` in plain torch: the reference that the fused ones are held against, and what a CPU runs.

The order of operations is that of transformers' modules, so that log-probabilities are theirs bit for bit, also in
bfloat16: a norm multiplies by its weight after rounding to x's precision, a rotation rounds both products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchOps:
    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight.to(x.dtype) * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

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
        if q_weight is not None:
            q = self.rms_norm(q, q_weight, eps)
        if k_weight is not None:
            k = self.rms_norm(k, k_weight, eps)
        cos, sin = cos[:, None], sin[:, None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation by halves of the first 2 R dimensions of x [T, heads, D]; cos, sin [T, 1, R] (none: x as it is)."""
    half = cos.shape[-1]
    if half == 0:
        return x
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
