"""Attention by FlexAttention, compiled, with a mask of blocks for the documents of a row.

Its backward is reached through autograd alone, so `backward` computes the forward again: a third more work there. The
part of a ring is derived from that too. With w = exp(lse of these keys - lse of all), the whole's probabilities are w
times those of these keys, and ds = w p (dp - delta) is what autograd gives for the gradients w dout of the output and
w (dout . out of these keys - dout . out of all) of the logsumexp.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from prl_models.blocks.kernel import Spans


class Flex:
    name = "flex"

    def __init__(self) -> None:
        self._last: tuple[Spans, bool, int | None, Any] | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self._run(q, k, v, spans, scale, causal, window)

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
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            here, lse_here = self._run(inputs[0], inputs[1], inputs[2], spans, scale, causal, window)
        share = (lse_here.detach() - lse).exp().nan_to_num(0.0)
        beyond = (grad.float() * (here.detach() - out).float()).sum(-1)
        weighted = (grad.float() * share[..., None]).to(grad.dtype)
        gradients = torch.autograd.grad((here, lse_here), inputs, (weighted, share * beyond))
        return gradients[0], gradients[1], gradients[2]

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        mask = self._mask(spans, len(q), len(k), causal, window)
        batches = [x.transpose(0, 1)[None] for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        out, beside = _compiled()(
            *batches, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
        )
        return out[0].transpose(0, 1), beside.lse[0].t()

    def _mask(self, spans: Spans, queries: int, keys: int, causal: bool, window: int | None) -> Any:
        """The row's block mask, made once for all layers."""
        if self._last is None or self._last[0] is not spans or self._last[1:3] != (causal, window):
            self._last = (spans, causal, window, _block_mask(spans, queries, keys, causal, window))
        return self._last[3]


def _block_mask(spans: Spans, queries: int, keys: int, causal: bool, window: int | None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    device = spans.cu_q.device
    of_query, of_key = (_documents(cu, n) for cu, n in ((spans.cu_q, queries), (spans.cu_k, keys)))
    ends_q, ends_k = spans.cu_q[1:].long(), spans.cu_k[1:].long()
    # A query's place counted in keys of its document: its distance from the end is that of the key it stands beside.
    place = torch.arange(queries, device=device) - ends_q[of_query] + ends_k[of_query]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = of_query[query] == of_key[key]
        if causal:
            seen = seen & (key <= place[query])
        if window is not None:
            seen = seen & (key > place[query] - window)
        return seen

    return create_block_mask(visible, None, None, queries, keys, device=str(device), _compile=device.type == "cuda")


def _documents(cu: Tensor, count: int) -> Tensor:
    """i64[count]: the stretch of each token."""
    tokens = torch.arange(count, device=cu.device, dtype=cu.dtype)
    return torch.searchsorted(cu, tokens, right=True).long() - 1


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
