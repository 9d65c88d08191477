"""Attention by cuDNN through torch, one call for each document: fast for few long ones. No windows.

cuDNN plans every pair of lengths that it has not seen, so rows whose lengths never repeat pay for plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl_models.blocks.attention import pair_backward, pair_forward
from prl_models.blocks.kernel import Spans


class Cudnn:
    """bfloat16 and float16. Single tokens, and causal stretches of unequal lengths, whose beginnings it would align
    instead of their ends, are written out."""

    name = "cudnn"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), device=q.device)
        for queries, keys in spans.pairs:
            if not _fits(queries, keys, causal, window):
                some, total = pair_forward(q[queries], k[keys], v[keys], scale, causal, window)
                out[queries], lse[:, queries] = some, total.t()
                continue
            found = torch.ops.aten._scaled_dot_product_cudnn_attention(
                _batch(q[queries]), _batch(k[keys]), _batch(v[keys]), None, True, 0.0, causal, False, scale=scale
            )
            out[queries] = found[0][0].transpose(0, 1)
            lse[:, queries] = found[1].reshape(q.shape[1], -1)
        return out, lse.t()

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
        grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
        for queries, keys in spans.pairs:
            some = (grad[queries], q[queries], k[keys], v[keys], out[queries])
            if not _fits(queries, keys, causal, window):
                found = pair_backward(*some, lse[queries], scale, causal, window)
                grad_q[queries], grad_k[keys], grad_v[keys] = found
                continue
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(_batch(x) for x in some),
                lse[queries].t().contiguous()[None, :, :, None],
                seed,
                seed,
                None,
                None,
                None,
                queries.stop - queries.start,
                keys.stop - keys.start,
                0.0,
                causal,
                scale=scale,
            )
            grad_q[queries], grad_k[keys], grad_v[keys] = (x[0].transpose(0, 1) for x in found)
        return grad_q, grad_k, grad_v


def _fits(queries: slice, keys: slice, causal: bool, window: int | None) -> bool:
    lengths = queries.stop - queries.start, keys.stop - keys.start
    return window is None and min(lengths) > 1 and not (causal and lengths[0] != lengths[1])


def _batch(x: Tensor) -> Tensor:
    """[n, heads, D] -> [1, heads, n, D], a view."""
    return x.transpose(0, 1)[None]
