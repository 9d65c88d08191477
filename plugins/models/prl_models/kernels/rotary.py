"""Norm over each head and rotation of queries and keys in Triton, in one pass over a token's heads.

Queries, keys and values are parts of one fused product, whose gradient is written as one tensor. A program
handles whole tokens, so that cosines, sines and weights are read once for all heads. Arithmetic is float32, rounded
where transformers rounds: x / rms(x), its product with the weight, and both products of a rotation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl_models.kernels.launch import persistent, power_of_two
from prl_models.kernels.rotary_kernels import backward_kernel, forward_kernel

_HEADS = 16
"""Heads of a token that are in registers at once."""


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
        forward_kernel[(q.shape[0],)](
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
    gradients: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor, Tensor],
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradients of queries, keys and values (which are copied) into `outputs`; those of the weights."""
    (grad_q, grad_k, grad_v), (q, k), (of_q, of_k, of_v) = gradients, inputs, outputs
    tokens, _, dim = q.shape
    programs = persistent(tokens, q.device)
    sums = torch.empty(2, programs, dim, dtype=torch.float32, device=q.device)
    if tokens:
        backward_kernel[(programs,)](
            grad_q,
            grad_k,
            grad_v,
            q,
            k,
            of_q,
            of_k,
            of_v,
            q if q_weight is None else q_weight,
            k if k_weight is None else k_weight,
            cos,
            sin,
            sums,
            tokens,
            *(stride for x in (grad_q, grad_k, grad_v, q, k, of_q, of_k, of_v) for stride in x.stride()[:2]),
            eps,
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
