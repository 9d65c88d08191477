"""Attention of a model, whether one rank computes a row or several share it (context parallelism).

`attend` is what models call. Alone, a rank's kernel runs over its documents. With Ulysses ranks exchange heads for
tokens around the kernel (`ulysses.py`); in a ring keys and values travel from rank to rank (`ring.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from prl_models.blocks.attention import packed_attention
from prl_models.blocks.cache import remembered
from prl_models.blocks.kernel import AttentionKernel, Spans
from prl_models.blocks.packing import Packing


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share every row. `style`: "ulysses" exchanges heads for tokens around attention; "ring" passes
    keys and values from rank to rank."""

    group: dist.ProcessGroup
    style: Literal["ulysses", "ring"] = "ulysses"

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float,
    window: int | None,
    kernel: AttentionKernel | None,
    context: ContextParallel | None = None,
) -> Tensor:
    """Causal attention within each document of a row.

    Args:
        query: [U, heads, D] for this rank's tokens (`PackedBatch.token_ids`).
        key, value: [U, kv_heads, D], heads a multiple of kv_heads.
        packing: of the whole row.
        scale: of the scores, before the softmax.
        window: a query sees at most this many keys, its own included; None: its whole document so far.
        kernel: what computes it; None: batches of padded documents by torch.
        context: the ranks that share the row.

    Returns:
        [U, heads, D].
    """
    if window is not None and window >= packing.max_length:
        window = None
    if context is not None:
        raise NotImplementedError("context parallelism follows")
    if kernel is None or packing.token_of is not None:
        return packed_attention(query, key, value, packing, scale, window)
    return kernel_attention(query, key, value, packing.spans, scale, window, kernel)


def kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, window: int | None, kernel: AttentionKernel
) -> Tensor:
    """Causal attention by a kernel, differentiable; selective recomputation keeps its result."""
    out: Tensor = _KernelAttention.apply(query, key, value, spans, scale, window, kernel)
    return out


class _KernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, spans, scale, window, kernel):  # type: ignore[no-untyped-def]
        out, lse = remembered(lambda: kernel.forward(q, k, v, spans, scale, True, window))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = (spans, scale, True, window)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gradients = ctx.kernel.backward(grad, *ctx.saved_tensors, *ctx.arguments)
        return *gradients, None, None, None, None
