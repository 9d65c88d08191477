"""SwiGLU in Triton (Shazeer 2020, arXiv 2002.05202): silu(gate) * up of one fused product, and its one gradient.

Arithmetic is float32, rounded after silu as transformers rounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl_models.kernels.launch import rows_of

_BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """As `Ops.swiglu`."""
    out: Tensor = _Swiglu.apply(gate_up)
    return out


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        rows = rows_of(gate_up)
        width = rows.shape[1] // 2
        out = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
        if out.numel():
            _forward_kernel[(len(rows), triton.cdiv(width, _BLOCK))](rows, out, width, rows.stride(0), BLOCK=_BLOCK)
        ctx.save_for_backward(rows)
        return out.view(*gate_up.shape[:-1], width)

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        width = rows.shape[1] // 2
        of_out = rows_of(grad)
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        if out.numel():
            strides = (rows.stride(0), of_out.stride(0))
            _backward_kernel[(len(rows), triton.cdiv(width, _BLOCK))](rows, of_out, out, width, *strides, BLOCK=_BLOCK)
        return out.view(*grad.shape[:-1], 2 * width)


@triton.jit
def _forward_kernel(gate_up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + column, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask, 0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(kind), mask)


@triton.jit
def _backward_kernel(gate_up, grad, out, width, stride, grad_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + column, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask, 0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + column, mask, 0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    of_silu = (g * up).to(kind).to(tl.float32)
    of_gate = of_silu * (share + silu * (1.0 - share))
    tl.store(out + row * 2 * width + column, of_gate.to(kind), mask)
    tl.store(out + row * 2 * width + width + column, (g * silu.to(kind).to(tl.float32)).to(kind), mask)
