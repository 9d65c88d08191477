"""Causal attention over packed documents that do not see one another.

Three kernels, by what the machine has:

* flash-attn's or torch's variable-length attention: CUDA, bfloat16 or float16.
* batches of padded documents through torch's scaled_dot_product_attention: everywhere.
* the same with the scores written out for short documents on CPU: there the fused kernel costs 16 ms forward and
  backward on 256 documents of 13 tokens, this 10 ms.

No kernel ever makes a [T, T] matrix: the largest is [documents, heads, length, length] of one bucket of documents of
at most `_WRITTEN_OUT` tokens, or one [length, length] mask where a sliding window asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from prl_models.blocks.packing import Packing, collect, pad

_WRITTEN_OUT = 48

Varlen = Callable[[Tensor, Tensor, Tensor, Packing, float, int | None], Tensor]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention within each document.

    Args:
        query: [U, heads, D] for the row's U distinct tokens.
        key, value: [U, kv_heads, D], heads a multiple of kv_heads.
        scale: of the scores, before the softmax.
        window: a query sees at most this many keys, its own included; None sees its whole document so far.

    Returns:
        [U, heads, D].
    """
    if window is not None and window >= packing.max_length:
        window = None
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and packing.token_of is None
    kernel = _varlen_kernel() if flash else None
    if kernel is not None:
        return kernel(query, key, value, packing, scale, window)
    return _padded(query, key, value, packing, scale, window)


def _padded(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
    parts = []
    for bucket in packing.buckets:
        batches = [pad(x, bucket).transpose(1, 2) for x in (q, k, v)]  # [documents, heads, length, D]
        short = q.device.type == "cpu" and bucket.length <= _WRITTEN_OUT
        kernel = _written_out if short else _fused
        out = kernel(batches[0], batches[1], batches[2], scale, window)
        parts.append(out.transpose(1, 2))
    return collect(parts, packing)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = ~_hidden(q.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _written_out(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    documents, heads, length, _ = q.shape
    mask = q.new_zeros(length, length).masked_fill_(_hidden(length, window, q.device), float("-inf"))
    flat = (x.reshape(documents * heads, length, -1) for x in (q, k, v))
    return _WrittenOut.apply(*flat, mask, scale).unflatten(0, (documents, heads))


class _WrittenOut(torch.autograd.Function):
    """softmax(scale q k^T + mask) v for [B, length, D]. Its own, because torch's softmax of rows whose length is not a
    multiple of 16 takes 3.0 ms where these four operations take 0.5 (1,024 times 13 x 13)."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale):  # type: ignore[no-untyped-def]
        p = torch.baddbmm(mask.expand(len(q), -1, -1), q, k.transpose(1, 2), alpha=scale)
        p.sub_(p.amax(-1, keepdim=True)).exp_()
        p.div_(p.sum(-1, keepdim=True))
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, p = ctx.saved_tensors
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        grad_s = torch.bmm(grad, v.transpose(1, 2)).mul_(p)
        grad_s.sub_(p * grad_s.sum(-1, keepdim=True)).mul_(ctx.scale)
        return torch.bmm(grad_s, k), torch.bmm(grad_s.transpose(1, 2), q), grad_v, None, None


def _hidden(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool[length, length]: keys a query must not see."""
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)
    if window is not None:
        hidden |= torch.ones(length, length, dtype=torch.bool, device=device).tril_(-window)
    return hidden


@cache
def _varlen_kernel() -> Varlen | None:
    """The best variable-length kernel that is installed, None without any."""
    for find in (_flash4, _flash2, _torch_varlen):
        try:
            return find()
        except ImportError:
            continue
    return None


def _flash4() -> Varlen:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

    def kernel(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=packing.cu_seqlens,
            cu_seqlens_k=packing.cu_seqlens,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        return out[0] if isinstance(out, tuple) else out

    return kernel


def _flash2() -> Varlen:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    def kernel(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
        bounds, longest = packing.cu_seqlens, packing.max_length
        reach = (-1, -1) if window is None else (window - 1, 0)
        return flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest, softmax_scale=scale, causal=True, window_size=reach
        )

    return kernel


def _torch_varlen() -> Varlen:
    from torch.nn.attention.varlen import varlen_attn

    def kernel(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # its own grouped heads came after torch 2.11
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        bounds, longest = packing.cu_seqlens, packing.max_length
        reach = (-1, 0) if window is None else (window - 1, 0)
        return varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            bounds,
            bounds,
            longest,
            longest,
            scale=scale,
            window_size=reach,
        )

    return kernel
