"""Where the documents of a packed row are, and how to lay them out as padded batches of similar length.

Tokens that follow the same prefix have the same hidden state in a causal model, so a row may hold them once: a group's
documents share their prompt. `shared_prefixes` finds them, and `Packing` hands each document its own copy of keys and
values while every other operation runs on the distinct tokens only. It is exact, also for gradients.

Padding copies some token into the empty places instead of zeros: causal attention puts padding after every real key, so
no real query sees it, and its output is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prl_models.blocks.kernel import Spans

if TYPE_CHECKING:
    from prl_models.blocks.ring import RingPlan

Ints = NDArray[np.int64]

_ALWAYS_TOGETHER = 32
"""Documents up to this length share one batch: padding costs less than another batch of small operations."""
_FULLNESS = 0.7
"""Longer ones share a batch with documents at least this share of its longest."""


@dataclass(frozen=True)
class Bucket:
    """`documents` documents padded to `length` tokens.

    Args:
        gather: i64[documents * length]: the token that stands in each place.
        real: i64[M]: the places that are not padding. owners: i64[M]: their tokens.
    """

    documents: int
    length: int
    gather: Tensor
    real: Tensor
    owners: Tensor


class Packing:
    """The documents of one row.

    Args:
        cu_seqlens: i32[documents + 1]: bounds of the documents over T places, ascending from 0.
        token_of: i64[T]: the token in each place, below the number of tokens U; None where every place is its own.

    Raises:
        ValueError: the bounds do not ascend from 0.
    """

    def __init__(self, cu_seqlens: NDArray[np.int32], device: torch.device, token_of: Ints | None = None) -> None:
        bounds = np.asarray(cu_seqlens, np.int64)
        if len(bounds) < 2 or bounds[0] != 0 or np.any(np.diff(bounds) < 1):
            raise ValueError(f"document bounds must ascend from 0 and leave no document empty, not {bounds[:8]}")
        self.device = device
        self.starts = bounds[:-1]
        self.lengths = np.diff(bounds)
        self.token_of = token_of
        self.num_tokens = int(bounds[-1]) if token_of is None else int(token_of.max()) + 1
        self.max_length = int(self.lengths.max())
        self.plans: dict[tuple[int, int], RingPlan] = {}

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """i32[documents + 1] on the row's device."""
        bounds = np.append(self.starts, self.starts[-1] + self.lengths[-1]).astype(np.int32)
        return torch.from_numpy(bounds).to(self.device)

    @cached_property
    def spans(self) -> Spans:
        """Every document, as queries and as keys."""
        return Spans(self.cu_seqlens, self.cu_seqlens, self.max_length, self.max_length)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The padded batches, computed once for all layers."""
        order = np.argsort(-self.lengths, kind="stable")
        descending = self.lengths[order]
        buckets = []
        first = 0
        while first < len(order):
            longest = int(descending[first])
            least = 1 if longest <= _ALWAYS_TOGETHER else max(_ALWAYS_TOGETHER, int(np.ceil(_FULLNESS * longest)))
            last = int(np.searchsorted(-descending, -least, side="right"))
            buckets.append(self._bucket(np.sort(order[first:last]), longest))
            first = last
        return buckets

    @cached_property
    def collect(self) -> Tensor:
        """i64[U]: for each token one of its places, counted over the places of all buckets one after another."""
        where = np.empty(self.num_tokens, np.int64)
        offset = 0
        for bucket in self.buckets:
            where[bucket.owners.cpu().numpy()] = bucket.real.cpu().numpy() + offset
            offset += bucket.documents * bucket.length
        return torch.from_numpy(where).to(self.device)

    def _bucket(self, documents: Ints, length: int) -> Bucket:
        starts, lengths = self.starts[documents], self.lengths[documents]
        columns = np.arange(length)
        is_real = columns[None, :] < lengths[:, None]
        gather = (starts[:, None] + np.where(is_real, columns[None, :], 0)).reshape(-1)
        if self.token_of is not None:
            gather = self.token_of[gather]
        real = np.flatnonzero(is_real)
        tensors = (torch.from_numpy(x).to(self.device) for x in (gather, real, gather[real]))
        return Bucket(len(documents), length, *tensors)


def pad(x: Tensor, bucket: Bucket) -> Tensor:
    """[U, ...] -> [documents, length, ...]."""
    return _Pad.apply(x, bucket).unflatten(0, (bucket.documents, bucket.length))


def collect(parts: list[Tensor], packing: Packing) -> Tensor:
    """[documents, length, ...] of every bucket -> [U, ...]."""
    places = [part.flatten(0, 1) for part in parts]
    return _Collect.apply(places[0] if len(places) == 1 else torch.cat(places), packing.collect)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bucket: Bucket) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.bucket, ctx.tokens = bucket, x.shape[0]
        return x.index_select(0, bucket.gather)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        bucket = ctx.bucket
        out = grad.new_zeros(ctx.tokens, *grad.shape[1:])
        return out.index_add_(0, bucket.owners, grad.index_select(0, bucket.real)), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.places, ctx.rows = places, x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        # Each place is read once at most, and what is not read gets zero: padding never reaches the keys it looked at.
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, ctx.places, grad), None


def shared_prefixes(token_ids: NDArray[np.int32], cu_seqlens: NDArray[np.int32]) -> Ints | None:
    """Number the distinct (prefix, token) pairs of a row: i64[T], ascending where they first occur by depth.

    Returns None where fewer than 1 in 16 tokens would be saved. Cost is one sort per depth: meant for documents of at
    most a few hundred tokens.
    """
    bounds = np.asarray(cu_seqlens, np.int64)
    lengths = np.diff(bounds)
    token_of = np.empty(int(bounds[-1]), np.int64)
    order = np.argsort(-lengths, kind="stable")
    starts, alive = bounds[:-1][order], lengths[order]
    node = np.zeros(len(order), np.int64)
    count = 0
    for depth in range(int(alive[0])):
        left = int(np.searchsorted(-alive, -depth, side="left"))  # documents longer than depth
        places = starts[:left] + depth
        keys = node[:left] << 32 | token_ids[places].astype(np.int64)
        distinct, number = np.unique(keys, return_inverse=True)
        node = number + count
        token_of[places] = node
        count += len(distinct)
    return token_of if count <= len(token_of) * 15 // 16 else None
