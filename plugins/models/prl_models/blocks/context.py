"""Attention of a model, whether one rank computes a row or several share it (context parallelism).

`attend` is what models call. Alone, a rank's kernel runs over its documents. With Ulysses ranks exchange heads for
tokens around the kernel (`ulysses.py`); in a ring keys and values travel from rank to rank (`ring.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.blocks.attention import Padded, packed_attention
from prl_models.blocks.cache import remembered
from prl_models.blocks.kernel import AttentionKernel, Spans
from prl_models.blocks.packing import Packing
from prl_models.blocks.ring import ring_attention, zigzag
from prl_models.blocks.ulysses import heads_to_tokens, tokens_to_heads
from prl_models.sharing import misfit


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

    def padded(self, tokens: int) -> int:
        """The length that a row of so many tokens is brought to: a multiple of the number of equal parts."""
        parts = self.size * (2 if self.style == "ring" else 1)
        return tokens + -tokens % parts

    def places(self, tokens: int) -> NDArray[np.int64]:
        """The places of a row of padded length that this rank computes, in its order."""
        if self.style == "ring":
            return zigzag(tokens, self.size, self.rank)
        part = tokens // self.size
        return np.arange(self.rank * part, (self.rank + 1) * part)


def check_heads(
    heads: int, kv_heads: int, cp: int, style: Literal["ulysses", "ring"], window: int | None = None
) -> None:
    """Whether `cp` ranks can share the rows of a model with so many heads.

    Raises:
        ConfigError: its heads cannot be divided among the ranks, or its layers have a sliding window under "ring".
    """
    found = misfit(heads, kv_heads, cp, style, window)
    if found is not None:
        raise ConfigError([f"trainer.{found[0]} {found[1]}"])


def sum_over_context(values: Tensor, context: ContextParallel | None) -> Tensor:
    """The sum of every rank's `values`, on each of them.

    The gradient is passed on as it is: every rank computes the same loss of the whole row, and its own values have
    that gradient. Summed over ranks, gradients of parameters are then those of one process.
    """
    if context is None:
        return values
    total: Tensor = _Sum.apply(values, context.group)
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, group):  # type: ignore[no-untyped-def]
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


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
        kernel: what computes it; None or `Padded`: batches of padded documents by torch.
        context: the ranks that share the row.

    Returns:
        [U, heads, D].
    """
    return _computed(query, key, value, packing, scale, window, kernel, context)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scale: float,
    window: int | None,
    kernel: AttentionKernel | None,
    context: ContextParallel | None,
) -> Tensor:
    if window is not None and window >= packing.max_length:
        window = None
    if context is None:
        return _alone(query, key, value, packing, scale, window, kernel)
    if context.style == "ulysses":
        q, k, v = tokens_to_heads(query, key, value, context.group)
        return heads_to_tokens(_alone(q, k, v, packing, scale, window, kernel), context.group)
    if window is not None:
        raise EnvironmentNotFit(f'cp_style = "ring" cannot compute a sliding window ({window} tokens): use "ulysses"')
    return ring_attention(query, key, value, packing, scale, kernel or Padded(), context.group)


_computed = _attend


def keep_out_of_graphs() -> None:
    """From here on torch.compile does not look into attention: its kernels are compiled already, and what it knows of
    documents is no part of a graph. Called where a model is compiled, because this imports the compiler."""
    global _computed
    _computed = torch.compiler.disable(_attend)


def _alone(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None, kernel: AttentionKernel | None
) -> Tensor:
    if kernel is None or isinstance(kernel, Padded) or packing.token_of is not None:
        return packed_attention(q, k, v, packing, scale, window)
    return kernel_attention(q, k, v, packing.spans, scale, window, kernel)


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
