"""`Ops` of the kernels of two libraries, and torch for what they do not have. To compare own kernels with."""

from __future__ import annotations

from torch import Tensor

from prl_models.blocks.torch_ops import TorchOps


class LigerOps(TorchOps):
    """Liger Kernel (pip install "prl-models[liger]"): norms and SwiGLU. Raises: ImportError: it is not installed."""

    name = "liger"

    def __init__(self) -> None:
        from liger_kernel.ops.fused_add_rms_norm import (  # type: ignore[import-not-found]
            LigerFusedAddRMSNormFunction,
        )
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # type: ignore[import-not-found]

        self._norm = LigerRMSNormFunction
        self._add_norm = LigerFusedAddRMSNormFunction
        self._swiglu = LigerFusedGateUpSiLUMulFunction

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._norm.apply(x, weight.to(x.dtype), eps, 0.0, "llama", False)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = self._add_norm.apply(x, residual, weight.to(x.dtype), eps, 0.0, "llama", False)
        return out, total

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self._swiglu.apply(gate_up)
        return out


class QuackOps(TorchOps):
    """QuACK (pip install "prl-models[quack]"): norms. Raises: ImportError: it is not installed."""

    name = "quack"

    def __init__(self) -> None:
        from quack.rmsnorm import rmsnorm  # type: ignore[import-not-found]

        self._norm = rmsnorm

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = self._norm(x, weight, eps=eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = self._norm(x, weight, residual=residual, eps=eps, prenorm=True)
        return out, total
