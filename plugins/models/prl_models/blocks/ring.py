"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values travel from rank to rank.

A row is cut into 2 n chunks, and rank r has the chunks r and 2 n - 1 - r (zig-zag), so that every rank has as much of
the causal triangle as the others. With rows cut like this every step is at most one call of the kernel:

* Step 0, a rank's own keys: a document's tokens in both chunks follow one another in the rank's order, and everything
  of it between them is on other ranks. So causal attention within the local pieces of documents is right.
* Step s, the keys of rank p = r - s: a later chunk sees an earlier one only through the one document that reaches from
  one to the other, and sees then all there is of it.
  p < r: keys of chunk p. The document ends in chunk r, or covers chunk r and goes on in chunk 2 n - 1 - r: one stretch
  of queries. p > r: queries of chunk 2 n - 1 - r. The document begins in chunk 2 n - 1 - p, or covers it and begins in
  chunk p: one stretch of keys.

So of a chunk others need only its tail: what it has of the document that reaches beyond it. Tails are all that travels,
the whole of one long document and next to nothing of many short ones.

No mask is made. Partial results are merged by the logarithm of their sums of exponentials, in float32. The keys of the
next step travel while those of this one are computed. In the backward pass they travel a second time, with their
gradients (float32) one step behind them, which are home after the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from prl_models.blocks.cache import remembered
from prl_models.blocks.kernel import AttentionKernel, Spans
from prl_models.blocks.packing import Packing


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, kernel: AttentionKernel, group: dist.ProcessGroup
) -> Tensor:
    """q [t, heads, D], k [t, kv_heads, D], v [t, kv_heads, E], t = T / n in zig-zag order -> [t, heads, E]."""
    plan = ring_plan(packing, dist.get_world_size(group), dist.get_rank(group))
    out: Tensor = _RingAttention.apply(q, k, v, plan, scale, kernel, group)
    return out


@dataclass(frozen=True)
class Step:
    """One call of the kernel, in which every query sees every key. `queries`: of a rank's own, in its order. `keys`: of
    the tails at hand, [its chunk p, its chunk 2 n - 1 - p]."""

    queries: slice
    keys: slice
    spans: Spans


@dataclass(frozen=True)
class RingPlan:
    """
    Args:
        local: pieces of documents of step 0.
        tails: what others need of this rank's keys, in its order.
        lengths: of every rank's tails together, by rank.
        steps: of the steps 1 to n - 1; None where nothing is seen.
    """

    local: Spans
    tails: tuple[slice, slice]
    lengths: tuple[int, ...]
    steps: tuple[Step | None, ...]


def zigzag(length: int, size: int, rank: int) -> NDArray[np.int64]:
    """The places of a row of `length` tokens (a multiple of 2 size) that a rank has, in its order."""
    chunk = length // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])


def ring_plan(packing: Packing, size: int, rank: int) -> RingPlan:
    """Made once for all layers of a row."""
    plan = packing.plans.get((size, rank))
    if plan is None:
        plan = packing.plans[size, rank] = _make_plan(packing, size, rank)
    return plan


def _make_plan(packing: Packing, size: int, rank: int) -> RingPlan:
    bounds = np.append(packing.starts, packing.starts[-1] + packing.lengths[-1])
    chunk = int(bounds[-1]) // (2 * size)
    document = np.searchsorted(bounds, zigzag(int(bounds[-1]), size, rank), side="right")
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(document)) + 1, [2 * chunk]])
    tails = [_tails(bounds, chunk, size, owner) for owner in range(size)]
    lengths = [(first.stop - first.start, second.stop - second.start) for first, second in tails]
    peers = ((rank - step) % size for step in range(1, size))
    steps = tuple(_step(bounds, chunk, size, rank, peer, lengths[peer], packing.device) for peer in peers)
    return RingPlan(_spans(cuts, cuts, packing.device), tails[rank], tuple(map(sum, lengths)), steps)


def _tails(bounds: NDArray[np.int64], chunk: int, size: int, rank: int) -> tuple[slice, slice]:
    found = []
    for place, number in enumerate((rank, 2 * size - 1 - rank)):
        begin, end = _document(bounds, (number + 1) * chunk - 1)
        following = number + (2 if number == size - 1 else 1)  # the chunk after size - 1 is the same rank's
        reaches_others = end > following * chunk
        hidden = max(0, begin - number * chunk) if reaches_others else chunk
        found.append(slice(place * chunk + hidden, (place + 1) * chunk))
    return found[0], found[1]


def _step(
    bounds: NDArray[np.int64],
    chunk: int,
    size: int,
    rank: int,
    peer: int,
    lengths: tuple[int, int],
    device: torch.device,
) -> Step | None:
    late, last = 2 * size - 1 - rank, 2 * size - 1 - peer
    begin, end = _document(bounds, (rank if peer < rank else late) * chunk)
    if begin >= (peer + 1 if peer < rank else last + 1) * chunk:
        return None
    seen = min(max(0, end - late * chunk), chunk)
    if peer < rank:
        queries, keys = (0, min(end - rank * chunk, chunk) + seen), (0, lengths[0])
    else:
        queries, keys = (chunk, chunk + seen), (0 if begin < (peer + 1) * chunk else lengths[0], sum(lengths))
    cu_q, cu_k = (np.array([0, stretch[1] - stretch[0]]) for stretch in (queries, keys))
    return Step(slice(*queries), slice(*keys), _spans(cu_q, cu_k, device))


def _document(bounds: NDArray[np.int64], place: int) -> tuple[int, int]:
    index = int(np.searchsorted(bounds, place, side="right"))
    return int(bounds[index - 1]), int(bounds[index])


def _spans(cu_q: NDArray[np.int64], cu_k: NDArray[np.int64], device: torch.device) -> Spans:
    # Two tensors, also where they are equal: a kernel may take one for "`out` and `lse` are of these keys alone".
    of_queries, of_keys = (torch.from_numpy(cu.astype(np.int32)).to(device) for cu in (cu_q, cu_k))
    return Spans(of_queries, of_keys, int(np.diff(cu_q).max()), int(np.diff(cu_k).max()))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale, kernel, group):  # type: ignore[no-untyped-def]
        out, lse = remembered(lambda: _forward(q, k, v, plan, scale, kernel, group))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = (plan, scale, kernel, group)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *_backward(grad, *ctx.saved_tensors, *ctx.arguments), None, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, scale: float, kernel: AttentionKernel, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    ring = _Ring(plan, group)
    following = ring.pass_on(_tail_of(k, v, plan), 1)
    out, lse = kernel.forward(q, k, v, plan.local, scale, True, None)
    merged = out.to(lse.dtype) if any(plan.steps) else out
    for number, step in enumerate(plan.steps, 1):
        keys = following.wait()
        if number < len(plan.steps):
            following = ring.pass_on(keys, number + 1)
        if step is None:
            continue
        seen, values = keys[step.keys].split((k.shape[-1], v.shape[-1]), -1)
        more, more_lse = kernel.forward(q[step.queries], seen, values, step.spans, scale, False, None)
        _merge(merged[step.queries], lse[step.queries], more, more_lse)
    return merged.to(q.dtype), lse


def _tail_of(k: Tensor, v: Tensor, plan: RingPlan) -> Tensor:
    """[tails, kv_heads, D + E]."""
    return torch.cat([torch.cat((k[tail], v[tail]), -1) for tail in plan.tails])


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Into `out` [Q, heads, D] and `lse` [Q, heads], in place. Both sums are of at least one key: no logarithm of 0."""
    difference = more_lse - lse
    out.lerp_(more.to(out.dtype), torch.sigmoid(difference)[..., None])
    lse.add_(torch.nn.functional.softplus(difference, threshold=50.0))


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: RingPlan,
    scale: float,
    kernel: AttentionKernel,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _Ring(plan, group)
    widths = (k.shape[-1], v.shape[-1])
    following = ring.pass_on(_tail_of(k, v, plan), 1)
    total_q, grad_k, grad_v = kernel.backward(grad, q, k, v, out, lse, plan.local, scale, True, None)
    total_q, total = total_q.to(lse.dtype), torch.cat((grad_k, grad_v), -1).to(lse.dtype)
    travelling: _Travelling | None = None
    for number, step in enumerate(plan.steps, 1):
        keys = following.wait()
        if number < len(plan.steps):
            following = ring.pass_on(keys, number + 1)
        parts = None
        if step is not None:
            mine = step.queries
            seen, values = keys[step.keys].split(widths, -1)
            these = (q[mine], seen, values, out[mine], lse[mine])
            parts = kernel.backward(grad[mine], *these, step.spans, scale, False, None)
        of_keys = torch.zeros_like(keys, dtype=lse.dtype) if travelling is None else travelling.wait()
        if step is not None and parts is not None:
            total_q[step.queries] += parts[0]
            for whole, more in zip(of_keys[step.keys].split(widths, -1), parts[1:], strict=True):
                whole += more
        travelling = ring.pass_on(of_keys, number + 1)
    if travelling is not None:
        first, second = plan.tails
        home = travelling.wait()
        total[first] += home[: first.stop - first.start]
        total[second] += home[first.stop - first.start :]
    of_k, of_v = total.split(widths, -1)
    return total_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


class _Travelling:
    """What the previous rank sends, and what is sent to the next one: kept until both have arrived."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[Any]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _Ring:
    """The neighbours of a rank, and how much they send."""

    def __init__(self, plan: RingPlan, group: dist.ProcessGroup) -> None:
        self._lengths, self._group = plan.lengths, group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._next = dist.get_global_rank(group, (self._rank + 1) % self._size)
        self._previous = dist.get_global_rank(group, (self._rank - 1) % self._size)

    def pass_on(self, tensor: Tensor, step: int) -> _Travelling:
        """Start to send a tensor to the next rank and to receive the previous one's, of the tails of `step`."""
        length = self._lengths[(self._rank - step) % self._size]
        received = tensor.new_empty(length, *tensor.shape[1:])
        operations = []
        if len(tensor):
            operations.append(dist.P2POp(dist.isend, tensor, self._next, self._group))
        if length:
            operations.append(dist.P2POp(dist.irecv, received, self._previous, self._group))
        return _Travelling(tensor, received, dist.batch_isend_irecv(operations) if operations else [])
