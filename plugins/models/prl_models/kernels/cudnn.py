"""Attention by cuDNN through torch, one call for each document: fast for few long ones. No windows.

cuDNN plans every pair of lengths that it has not seen, so rows whose lengths never repeat pay for plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl_models.blocks.attention import Padded
from prl_models.blocks.kernel import Spans


class Cudnn:
    """bfloat16 and float16. Stretches of unequal lengths that are causal go to `Padded`: cuDNN aligns their beginnings,
    not their ends."""

    name = "cudnn"

    def __init__(self) -> None:
        self._unequal = Padded()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        pairs = spans.pairs
        if window is not None or _unequal(pairs, causal):
            return self._unequal.forward(q, k, v, spans, scale, causal, window)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), device=q.device)
        for queries, keys in pairs:
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
        pairs = spans.pairs
        if window is not None or _unequal(pairs, causal):
            return self._unequal.backward(grad, q, k, v, out, lse, spans, scale, causal, window)
        gradients = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that there is not
        for queries, keys in pairs:
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                _batch(grad[queries]),
                _batch(q[queries]),
                _batch(k[keys]),
                _batch(v[keys]),
                _batch(out[queries]),
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
            for whole, part, where in zip(gradients, found, (queries, keys, keys)):
                whole[where] = part[0].transpose(0, 1)
        return gradients[0], gradients[1], gradients[2]


def _unequal(pairs: list[tuple[slice, slice]], causal: bool) -> bool:
    return causal and any(q.stop - q.start != k.stop - k.start for q, k in pairs)


def _batch(x: Tensor) -> Tensor:
    """[n, heads, D] -> [1, heads, n, D], a view."""
    return x.transpose(0, 1)[None]
