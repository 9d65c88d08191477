"""Causal attention over packed documents that do not see one another, by torch's own operations.

* batches of padded documents through torch's scaled_dot_product_attention: everywhere.
* the same with the scores written out for short documents on CPU: there the fused kernel costs 16 ms forward and
  backward on 256 documents of 13 tokens, this 10 ms.
* `Padded`, an `AttentionKernel` in any precision with the scores of one pair of stretches written out: for what a
  batch cannot do, parts of a ring above all, and the reference of the fused kernels in `prl_models.kernels`.

`packed_attention` never makes a [T, T] matrix: the largest is [documents, heads, length, length] of one bucket of
documents of at most `_WRITTEN_OUT` tokens, or one [length, length] mask where a sliding window asks for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prl_models.blocks.kernel import Spans
from prl_models.blocks.packing import Packing, collect, pad

_WRITTEN_OUT = 48


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
    parts = []
    for bucket in packing.buckets:
        batches = [pad(x, bucket).transpose(1, 2) for x in (query, key, value)]  # [documents, heads, length, D]
        short = query.device.type == "cpu" and bucket.length <= _WRITTEN_OUT
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


class Padded:
    """An `AttentionKernel` with written-out scores, float32 at least: [heads, queries, keys] of one pair at a time."""

    name = "padded"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=kind)
        for queries, keys in spans.pairs:
            out[queries], lse[queries] = pair_forward(q[queries], k[keys], v[keys], scale, causal, window)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spans: Spans,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in spans.pairs:
            of_queries = (grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries])
            grad_q[queries], grad_k[keys], grad_v[keys] = pair_backward(*of_queries, scale, causal, window)
        return grad_q, grad_k, grad_v


def pair_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """`AttentionKernel.forward` of one stretch of queries and one of keys."""
    scores = _scores(q, k, scale, causal, window)
    total = torch.logsumexp(scores, -1, keepdim=True)
    p = (scores - total.masked_fill(total == float("-inf"), 0.0)).exp()
    return torch.bmm(p, _heads(v, q.shape[1])).transpose(0, 1).to(q.dtype), total[:, :, 0].t()


def pair_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`AttentionKernel.backward` of one stretch of queries and one of keys."""
    heads, kv_heads = q.shape[1], k.shape[1]
    scores = _scores(q, k, scale, causal, window)
    total = lse.t()[:, :, None].to(scores.dtype)
    p = (scores - total.masked_fill(total == float("-inf"), 0.0)).exp()
    grad_out = _heads(grad, heads)
    delta = (grad_out * _heads(out, heads)).sum(-1, keepdim=True)
    grad_s = (torch.bmm(grad_out, _heads(v, heads).transpose(1, 2)) - delta) * p * scale
    grad_q = torch.bmm(grad_s, _heads(k, heads)).transpose(0, 1).to(q.dtype)
    grad_k = _of_keys(torch.bmm(grad_s.transpose(1, 2), _heads(q, heads)), kv_heads).to(k.dtype)
    grad_v = _of_keys(torch.bmm(p.transpose(1, 2), grad_out), kv_heads).to(v.dtype)
    return grad_q, grad_k, grad_v


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, window: int | None) -> Tensor:
    """[heads, n, m] of q [n, heads, D] and k [m, kv_heads, D]; the last query is where the last key is."""
    scores = torch.bmm(_heads(q, q.shape[1]), _heads(k, q.shape[1]).transpose(1, 2)) * scale
    ahead = torch.arange(k.shape[0], device=q.device) - torch.arange(q.shape[0], device=q.device)[:, None]
    ahead -= k.shape[0] - q.shape[0]  # how far a key is ahead of a query
    if causal:
        scores.masked_fill_(ahead > 0, float("-inf"))
    if window is not None:
        scores.masked_fill_(ahead <= -window, float("-inf"))
    return scores


def _heads(x: Tensor, heads: int) -> Tensor:
    """[n, kv_heads, D] -> [heads, n, D] in float32 at least."""
    x = x.transpose(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    return x if len(x) == heads else x.repeat_interleave(heads // len(x), 0)


def _of_keys(x: Tensor, kv_heads: int) -> Tensor:
    """[heads, m, D], summed over the heads that share a key -> [m, kv_heads, D]."""
    return x.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
