"""Norm over each head and rotation of queries and keys in Triton, in one pass over a token's heads.

Queries, keys and values may be parts of one fused product; its gradient is then written as one tensor. A program
handles whole tokens, so that cosines, sines and weights are read once for all heads. Arithmetic is float32, rounded
where transformers rounds: x / rms(x), its product with the weight, and both products of a rotation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl_models.kernels.launch import persistent, power_of_two

_HEADS = 16
"""Heads of a token that are in registers at once."""


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As `Ops.qk_norm_rope`."""
    q_out, k_out = _QkNormRope.apply(q, k, q_weight, k_weight, eps, cos, sin)
    return q_out, k_out


def qkv_norm_rope(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `Ops.qkv_norm_rope`; v is a view of `qkv`."""
    q, k, v = _QkvNormRope.apply(qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin)
    return q, k, v


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, eps, cos, sin):
        q, k = _neighbours(q), _neighbours(k)
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        return _forward(q, k, q_weight, k_weight, eps, cos, sin)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        of_q, of_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        of_weights = _backward(
            (_neighbours(grad_q), _neighbours(grad_k), None), (q, k), (of_q, of_k, None), q_weight, k_weight, ctx.eps,
            cos, sin,
        )  # fmt: skip
        return of_q, of_k, *of_weights, None, None, None


class _QkvNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin):
        qkv = _neighbours(qkv)
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.heads, ctx.eps = (heads, kv_heads, kv_heads), eps
        q, k, v = _split(qkv, ctx.heads)
        return *_forward(q, k, q_weight, k_weight, eps, cos, sin), v

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        q, k, _ = _split(qkv, ctx.heads)
        gradients = (_neighbours(grad_q), _neighbours(grad_k), _neighbours(grad_v))
        of_weights = _backward(gradients, (q, k), _split(out, ctx.heads), q_weight, k_weight, ctx.eps, cos, sin)
        return out, None, None, *of_weights, None, None, None


def _neighbours(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _split(qkv: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (heads + 2 kv_heads) D] -> [T, heads, D], [T, kv_heads, D] twice, all views."""
    q, k, v = qkv.unflatten(-1, (sum(heads), -1)).split(heads, dim=1)
    return q, k, v


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.shape[0]:
        _forward_kernel[(q.shape[0],)](
            q,
            k,
            q_out,
            k_out,
            q if q_weight is None else q_weight,
            k if k_weight is None else k_weight,
            cos,
            sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            eps,
            **constants(q, k, q_weight is not None, k_weight is not None, cos),
        )
    return q_out, k_out


def _backward(
    gradients: tuple[Tensor, Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor | None],
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of queries, keys (and values, which are copied) into `outputs`; those of the weights."""
    (grad_q, grad_k, grad_v), (q, k), (of_q, of_k, of_v) = gradients, inputs, outputs
    tokens, _, dim = q.shape
    programs = persistent(tokens, q.device)
    sums = torch.empty(2, programs, dim, dtype=torch.float32, device=q.device)
    copied, into = (q, q) if grad_v is None or of_v is None else (grad_v, of_v)
    if tokens:
        _backward_kernel[(programs,)](
            grad_q,
            grad_k,
            copied,
            q,
            k,
            of_q,
            of_k,
            into,
            q if q_weight is None else q_weight,
            k if k_weight is None else k_weight,
            cos,
            sin,
            sums,
            tokens,
            *(stride for x in (grad_q, grad_k, copied, q, k, of_q, of_k, into) for stride in x.stride()[:2]),
            eps,
            COPY=grad_v is not None,
            **constants(q, k, q_weight is not None, k_weight is not None, cos),
        )
    total = sums.sum(1) if q_weight is not None or k_weight is not None else sums
    return (
        None if q_weight is None else total[0].to(q_weight.dtype),
        None if k_weight is None else total[1].to(k_weight.dtype),
    )


def constants(q: Tensor, k: Tensor, q_norm: bool, k_norm: bool, cos: Tensor) -> dict[str, int | bool]:
    """What the kernels are compiled for. A head is two halves that are rotated with one another, and a rest; without
    rotation just two halves."""
    dim = q.shape[-1]
    rotated = cos.shape[-1] > 0
    half = cos.shape[-1] if rotated else dim // 2
    heads, kv_heads = (min(_HEADS, power_of_two(x.shape[1])) for x in (q, k))
    return {
        "HEADS": q.shape[1],
        "KV_HEADS": k.shape[1],
        "DIM": dim,
        "HALF": half,
        "REST": dim - 2 * half,
        "HEADS_BLOCK": heads,
        "KV_BLOCK": kv_heads,
        "HALF_BLOCK": power_of_two(half),
        "REST_BLOCK": power_of_two(dim - 2 * half),
        "DIM_BLOCK": power_of_two(dim),
        "Q_NORM": q_norm,
        "K_NORM": k_norm,
        "ROTATE": rotated,
        "num_warps": 2 if heads * dim <= 1024 else 4,
    }


@triton.jit
def _forward_kernel(
    q,
    k,
    q_out,
    k_out,
    q_weight,
    k_weight,
    cos,
    sin,
    q_token,
    q_head,
    k_token,
    k_head,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cos += token * HALF
    sin += token * HALF
    _heads_forward(
        q + token * q_token, q_out + token * HEADS * DIM, q_weight, cos, sin, q_head, eps,
        HEADS, HEADS_BLOCK, DIM, HALF, REST, HALF_BLOCK, REST_BLOCK, Q_NORM, ROTATE,
    )  # fmt: skip
    _heads_forward(
        k + token * k_token, k_out + token * KV_HEADS * DIM, k_weight, cos, sin, k_head, eps,
        KV_HEADS, KV_BLOCK, DIM, HALF, REST, HALF_BLOCK, REST_BLOCK, K_NORM, ROTATE,
    )  # fmt: skip


@triton.jit
def _heads_forward(
    x,
    out,
    weight,
    cos,
    sin,
    stride,
    eps,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """All heads of one token: x [COUNT, DIM] with `stride` between heads -> out, without gaps."""
    column, tail = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    kind = out.dtype.element_ty
    for start in tl.static_range(0, COUNT, BLOCK):
        head = start + tl.arange(0, BLOCK)[:, None]
        halves, rests = (head < COUNT) & (column < HALF), (head < COUNT) & (tail < REST)
        at = x + head * stride
        first = tl.load(at + column, halves, 0.0).to(tl.float32)
        second = tl.load(at + HALF + column, halves, 0.0).to(tl.float32)
        rest = tl.load(at + 2 * HALF + tail, rests, 0.0).to(tl.float32)
        if NORM:
            square = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
            scale = tl.rsqrt(square / DIM + eps)[:, None]
            first = _weighted(first * scale, weight, column, HALF, kind)
            second = _weighted(second * scale, weight + HALF, column, HALF, kind)
            rest = _weighted(rest * scale, weight + 2 * HALF, tail, REST, kind)
        if ROTATE:
            c = tl.load(cos + column, column < HALF, 0.0).to(tl.float32)
            s = tl.load(sin + column, column < HALF, 0.0).to(tl.float32)
            before = first
            first = _rounded(first * c, kind) - _rounded(second * s, kind)
            second = _rounded(second * c, kind) + _rounded(before * s, kind)
        to = out + head * DIM
        tl.store(to + column, first.to(kind), halves)
        tl.store(to + HALF + column, second.to(kind), halves)
        tl.store(to + 2 * HALF + tail, rest.to(kind), rests)


@triton.jit(do_not_specialize=["tokens"])
def _backward_kernel(
    grad_q,
    grad_k,
    grad_v,
    q,
    k,
    of_q,
    of_k,
    of_v,
    q_weight,
    k_weight,
    cos,
    sin,
    sums,
    tokens,
    grad_q_token,
    grad_q_head,
    grad_k_token,
    grad_k_head,
    grad_v_token,
    grad_v_head,
    q_token,
    q_head,
    k_token,
    k_head,
    of_q_token,
    of_q_head,
    of_k_token,
    of_k_head,
    of_v_token,
    of_v_head,
    eps,
    COPY: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    q_first = tl.zeros((HEADS_BLOCK, HALF_BLOCK), tl.float32)
    q_second = tl.zeros((HEADS_BLOCK, HALF_BLOCK), tl.float32)
    q_rest = tl.zeros((HEADS_BLOCK, REST_BLOCK), tl.float32)
    k_first = tl.zeros((KV_BLOCK, HALF_BLOCK), tl.float32)
    k_second = tl.zeros((KV_BLOCK, HALF_BLOCK), tl.float32)
    k_rest = tl.zeros((KV_BLOCK, REST_BLOCK), tl.float32)
    index = tl.program_id(0)
    while index < tokens:
        token = index.to(tl.int64)
        q_first, q_second, q_rest = _heads_backward(
            grad_q + token * grad_q_token, q + token * q_token, of_q + token * of_q_token, q_weight,
            cos + token * HALF, sin + token * HALF, q_first, q_second, q_rest, grad_q_head, q_head, of_q_head, eps,
            HEADS, HEADS_BLOCK, DIM, HALF, REST, HALF_BLOCK, REST_BLOCK, Q_NORM, ROTATE,
        )  # fmt: skip
        k_first, k_second, k_rest = _heads_backward(
            grad_k + token * grad_k_token, k + token * k_token, of_k + token * of_k_token, k_weight,
            cos + token * HALF, sin + token * HALF, k_first, k_second, k_rest, grad_k_head, k_head, of_k_head, eps,
            KV_HEADS, KV_BLOCK, DIM, HALF, REST, HALF_BLOCK, REST_BLOCK, K_NORM, ROTATE,
        )  # fmt: skip
        if COPY:
            _copy_heads(
                grad_v + token * grad_v_token, of_v + token * of_v_token, grad_v_head, of_v_head,
                KV_HEADS, KV_BLOCK, DIM, DIM_BLOCK,
            )  # fmt: skip
        index += tl.num_programs(0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    if Q_NORM:
        _store_sums(sums + program * DIM, q_first, q_second, q_rest, HALF, REST, HALF_BLOCK, REST_BLOCK)
    if K_NORM:
        _store_sums(sums + (programs + program) * DIM, k_first, k_second, k_rest, HALF, REST, HALF_BLOCK, REST_BLOCK)


@triton.jit
def _heads_backward(
    grad,
    x,
    out,
    weight,
    cos,
    sin,
    of_first,
    of_second,
    of_rest,
    grad_stride,
    stride,
    out_stride,
    eps,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """The gradient of one token's heads into `out`; the weight's is added to the sums `of_*`."""
    column, tail = tl.arange(0, HALF_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    kind = out.dtype.element_ty
    for start in tl.static_range(0, COUNT, BLOCK):
        head = start + tl.arange(0, BLOCK)[:, None]
        halves, rests = (head < COUNT) & (column < HALF), (head < COUNT) & (tail < REST)
        at = grad + head * grad_stride
        g_first = tl.load(at + column, halves, 0.0).to(tl.float32)
        g_second = tl.load(at + HALF + column, halves, 0.0).to(tl.float32)
        g_rest = tl.load(at + 2 * HALF + tail, rests, 0.0).to(tl.float32)
        if ROTATE:
            c = tl.load(cos + column, column < HALF, 0.0).to(tl.float32)
            s = tl.load(sin + column, column < HALF, 0.0).to(tl.float32)
            before = g_first
            g_first = g_first * c + g_second * s
            g_second = g_second * c - before * s
        if NORM:
            at = x + head * stride
            first = tl.load(at + column, halves, 0.0).to(tl.float32)
            second = tl.load(at + HALF + column, halves, 0.0).to(tl.float32)
            rest = tl.load(at + 2 * HALF + tail, rests, 0.0).to(tl.float32)
            square = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
            scale = tl.rsqrt(square / DIM + eps)[:, None]
            first, second, rest = first * scale, second * scale, rest * scale
            of_first += g_first * _rounded(first, kind)
            of_second += g_second * _rounded(second, kind)
            of_rest += g_rest * _rounded(rest, kind)
            g_first *= _weight(weight, column, HALF, kind)
            g_second *= _weight(weight + HALF, column, HALF, kind)
            g_rest *= _weight(weight + 2 * HALF, tail, REST, kind)
            along = tl.sum(g_first * first, 1) + tl.sum(g_second * second, 1) + tl.sum(g_rest * rest, 1)
            along = (along / DIM)[:, None]
            g_first = scale * (g_first - first * along)
            g_second = scale * (g_second - second * along)
            g_rest = scale * (g_rest - rest * along)
        to = out + head * out_stride
        tl.store(to + column, g_first.to(kind), halves)
        tl.store(to + HALF + column, g_second.to(kind), halves)
        tl.store(to + 2 * HALF + tail, g_rest.to(kind), rests)
    return of_first, of_second, of_rest


@triton.jit
def _copy_heads(
    x, out, stride, out_stride, COUNT: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    column = tl.arange(0, WIDTH)[None, :]
    for start in tl.static_range(0, COUNT, BLOCK):
        head = start + tl.arange(0, BLOCK)[:, None]
        there = (head < COUNT) & (column < DIM)
        tl.store(out + head * out_stride + column, tl.load(x + head * stride + column, there), there)


@triton.jit
def _store_sums(
    out, first, second, rest, HALF: tl.constexpr, REST: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr
):
    column, tail = tl.arange(0, HALF_BLOCK), tl.arange(0, REST_BLOCK)
    tl.store(out + column, tl.sum(first, 0), column < HALF)
    tl.store(out + HALF + column, tl.sum(second, 0), column < HALF)
    tl.store(out + 2 * HALF + tail, tl.sum(rest, 0), tail < REST)


@triton.jit
def _weighted(x, weight, column, COUNT: tl.constexpr, kind: tl.constexpr):
    return _rounded(_rounded(x, kind) * _weight(weight, column, COUNT, kind), kind)


@triton.jit
def _weight(weight, column, COUNT: tl.constexpr, kind: tl.constexpr):
    return _rounded(tl.load(weight + column, column < COUNT, 0.0), kind)


@triton.jit
def _rounded(x, kind: tl.constexpr):
    return x.to(kind).to(tl.float32)
