"""The Triton kernels of `rotary`: a program handles all heads of a token, `BLOCK` of them in registers at once.

A head's DIM values are two halves of HALF that are rotated with one another, and a REST that is not rotated; each is
loaded into a tile of its own, padded to a power of two. Nothing is compiled anew for another number of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
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
def backward_kernel(
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
