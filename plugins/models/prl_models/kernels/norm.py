"""RMS norms in Triton (Zhang and Sennrich 2019, arXiv 1910.07467), with the residual addition before them.

One read and one write of every tensor, forward and backward. Arithmetic is float32; it is rounded where transformers'
modules round: x / rms(x) before the weight, and the sum of a residual addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl_models.kernels.launch import persistent, power_of_two, rows_of

_FORWARD, _BACKWARD = 4096, 2048
"""Elements that one program of four warps handles at once: 32 or 16 to a thread. Backward, 32 would take 183 registers
and leave room for two programs on a multiprocessor."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `Ops.rms_norm`."""
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `Ops.add_rms_norm`."""
    out, total = _AddRmsNorm.apply(x, residual, weight, eps)
    return out, total


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rows = rows_of(x)
        out, _ = _forward(rows, None, weight, eps)
        ctx.save_for_backward(rows, weight)
        ctx.eps = eps
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        grad_x, grad_weight = _backward(rows_of(grad), None, rows, weight, ctx.eps, ctx.needs_input_grad[1])
        return grad_x.view(grad.shape), grad_weight, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        out, total = _forward(rows_of(x), rows_of(residual), weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return out.view(x.shape), total.view(x.shape)

    @staticmethod
    def backward(ctx, grad, grad_total):
        total, weight = ctx.saved_tensors
        if grad is None:
            return grad_total, grad_total, None, None
        beside = None if grad_total is None else rows_of(grad_total)
        grad_x, grad_weight = _backward(rows_of(grad), beside, total, weight, ctx.eps, ctx.needs_input_grad[2])
        grad_x = grad_x.view(grad.shape)
        return grad_x, grad_x, grad_weight, None


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, H] each -> the norm of the sum, and the sum (x itself without a residual)."""
    count, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    added = x if residual is None else residual
    block, rows, warps = _shape(width, _FORWARD)
    if count:
        _forward_kernel[(triton.cdiv(count, rows),)](
            x,
            added,
            weight,
            out,
            total,
            count,
            width,
            x.stride(0),
            added.stride(0),
            eps,
            RESIDUAL=residual is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return out, total


def _backward(
    grad: Tensor, beside: Tensor | None, x: Tensor, weight: Tensor, eps: float, weight_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, with `beside` added, and of the weight."""
    count, width = x.shape
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, rows, warps = _shape(width, _BACKWARD)
    tiles = triton.cdiv(count, rows)
    programs = persistent(tiles, x.device)
    sums = torch.empty(programs if weight_grad else 0, width, dtype=torch.float32, device=x.device)
    added = grad if beside is None else beside
    if count:
        _backward_kernel[(programs,)](
            grad,
            added,
            x,
            weight,
            grad_x,
            sums,
            count,
            tiles,
            width,
            grad.stride(0),
            added.stride(0),
            x.stride(0),
            eps,
            BESIDE=beside is not None,
            WEIGHT_GRAD=weight_grad,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
    return grad_x, sums.sum(0).to(weight.dtype) if weight_grad else None


def _shape(width: int, tile: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program's tile."""
    block = power_of_two(width)
    return block, max(1, tile // block), min(16, max(4, 4 * block // tile))


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x,
    residual,
    weight,
    out,
    total,
    count,
    width,
    x_stride,
    residual_stride,
    eps,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < count) & (column < width)
    kind = out.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + row * residual_stride + column, mask, 0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(total + row * width + column, rounded, mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    w = tl.load(weight + column, column < width, 0.0).to(kind).to(tl.float32)
    normed = (value * scale).to(kind).to(tl.float32)
    tl.store(out + row * width + column, (normed * w).to(kind), mask)


@triton.jit(do_not_specialize=["count", "tiles"])
def _backward_kernel(
    grad,
    beside,
    x,
    weight,
    grad_x,
    sums,
    count,
    tiles,
    width,
    grad_stride,
    beside_stride,
    x_stride,
    eps,
    BESIDE: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    kind = grad_x.dtype.element_ty
    w = tl.load(weight + column, column < width, 0.0).to(kind).to(tl.float32)
    of_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    tile = tl.program_id(0)
    while tile < tiles:  # not a range: Triton 3.6's interpreter has none over tensors with NumPy 2.4
        row = (tile.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (row < count) & (column < width)
        value = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
        g = tl.load(grad + row * grad_stride + column, mask, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        normed = value * scale
        if WEIGHT_GRAD:
            of_weight += g * normed.to(kind).to(tl.float32)
        g *= w
        g = scale * (g - normed * (tl.sum(g * normed, 1) / width)[:, None])
        if BESIDE:
            g += tl.load(beside + row * beside_stride + column, mask, 0.0).to(tl.float32)
        tl.store(grad_x + row * width + column, g.to(kind), mask)
        tile += tl.num_programs(0)
    if WEIGHT_GRAD:
        at = tl.arange(0, BLOCK)
        tl.store(sums + tl.program_id(0) * width + at, tl.sum(of_weight, 0), at < width)
