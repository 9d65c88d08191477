"""Attention by the flash kernels: FlashAttention 4, FlashAttention 2, and the copy of 2 within torch.

All take grouped heads as they are. Each is entered below its autograd.Function, where forward gives the logsumexp and
backward takes any: those entries are private, so a release may move them, and `prl_models.kernels` then says so.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from prl_models.blocks.kernel import Spans


class Flash4:
    """flash-attn-4 (Dao-AILab, CuTe): Hopper and newer, bfloat16 and float16."""

    name = "flash4"

    def __init__(self) -> None:
        _keep_compiled()
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # type: ignore[import-not-found]

        self._forward, self._backward = _flash_attn_fwd, _flash_attn_bwd

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        options = self._options(spans, scale, causal, window)
        found = self._forward(q.detach(), k.detach(), v.detach(), return_lse=True, **options)
        return found[0], found[1].t()

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
        options = self._options(spans, scale, causal, window)
        found = self._backward(q, k, v, out, grad.contiguous(), lse.t().contiguous(), **options)
        return found[0], found[1], found[2]

    @staticmethod
    def _options(spans: Spans, scale: float, causal: bool, window: int | None) -> dict[str, object]:
        return {
            "cu_seqlens_q": spans.cu_q,
            "cu_seqlens_k": spans.cu_k,
            "max_seqlen_q": spans.max_q,
            "max_seqlen_k": spans.max_k,
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": None if window is None else window - 1,
        }


def _keep_compiled() -> None:
    """Have FlashAttention 4 keep what it compiles: `prl bench trainer` on two H200s took 41 s at first and 25 s after.
    Its own default folder lies in /tmp, where another user could leave object code for us to load; ours is within the
    user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache / "prl" / "flash-attention-4"))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


class Flash2:
    """flash-attn 2: Ampere and newer, bfloat16 and float16."""

    name = "flash2"

    def __init__(self) -> None:
        from flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
            _flash_attn_varlen_backward,
            _flash_attn_varlen_forward,
        )

        self._forward, self._backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        options = self._options(spans, scale, causal, window)
        found = self._forward(_rows(q), _rows(k), _rows(v), **options)
        return found[0], _from_flash2(found[1], spans).t()

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
        gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._backward(
            grad.contiguous(),
            _rows(q),
            _rows(k),
            _rows(v),
            out,
            _to_flash2(lse.t(), spans),
            *gradients,
            **self._options(spans, scale, causal, window),
            alibi_slopes=None,
            deterministic=False,
        )
        return gradients[0], gradients[1], gradients[2]

    @staticmethod
    def _options(spans: Spans, scale: float, causal: bool, window: int | None) -> dict[str, object]:
        return {
            "cu_seqlens_q": spans.cu_q,
            "cu_seqlens_k": spans.cu_k,
            "max_seqlen_q": spans.max_q,
            "max_seqlen_k": spans.max_k,
            "dropout_p": 0.0,
            "softmax_scale": scale,
            "causal": causal,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0 if causal else -1,
            "softcap": 0.0,
        }


class Varlen:
    """FlashAttention 2 as it is within torch, what `torch.nn.attention.varlen` calls: Ampere and newer."""

    name = "varlen"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._flash_attention_forward(
            _rows(q),
            _rows(k),
            _rows(v),
            spans.cu_q,
            spans.cu_k,
            spans.max_q,
            spans.max_k,
            0.0,
            causal,
            False,
            scale=scale,
            **self._window(causal, window),
        )
        return found[0], _from_flash2(found[1], spans).t()

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
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        found = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            _rows(q),
            _rows(k),
            _rows(v),
            out,
            _to_flash2(lse.t(), spans),
            spans.cu_q,
            spans.cu_k,
            spans.max_q,
            spans.max_k,
            0.0,
            causal,
            seed,
            torch.empty(0, device=q.device),
            scale=scale,
            **self._window(causal, window),
        )
        return found[0], found[1], found[2]

    @staticmethod
    def _window(causal: bool, window: int | None) -> dict[str, int | None]:
        if window is None:
            return {"window_size_left": None, "window_size_right": None}
        return {"window_size_left": window - 1, "window_size_right": 0 if causal else -1}


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _from_flash2(lse: Tensor, spans: Spans) -> Tensor:
    """Version 2 writes +inf for a query that sees nothing, which only stretches of their own keys can give."""
    return lse if spans.cu_q is spans.cu_k else lse.masked_fill(lse == float("inf"), float("-inf"))


def _to_flash2(lse: Tensor, spans: Spans) -> Tensor:
    lse = lse.contiguous()
    return lse if spans.cu_q is spans.cu_k else lse.masked_fill(lse == float("-inf"), float("inf"))
