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

No mask is made. Partial results are merged by the logarithm of their sums of exponentials, in float32. The keys of the
next step travel while those of this one are computed. In the backward pass they travel a second time, with their
gradients (float32) one step behind them, which are home after n steps.
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
    out: Tensor = _Ring.apply(q, k, v, plan, scale, kernel, group)
    return out


@dataclass(frozen=True)
class Step:
    """Queries and keys of one call, as slices of a rank's local order; every query sees every key."""

    queries: slice
    keys: slice
    spans: Spans


@dataclass(frozen=True)
class RingPlan:
    """`local`: pieces of documents of step 0. `steps`: of the steps 1 to n - 1; None where nothing is seen."""

    local: Spans
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
    steps = (_step(bounds, chunk, size, rank, (rank - step) % size, packing.device) for step in range(1, size))
    return RingPlan(_spans(cuts, cuts, packing.device), tuple(steps))


def _step(bounds: NDArray[np.int64], chunk: int, size: int, rank: int, peer: int, device: torch.device) -> Step | None:
    late, last = 2 * size - 1 - rank, 2 * size - 1 - peer
    if peer < rank:
        begin, end = _document(bounds, rank * chunk)
        if begin >= (peer + 1) * chunk:
            return None
        seen = min(end - rank * chunk, chunk) + max(0, min(end - late * chunk, chunk))
        queries, keys = (0, seen), (max(0, begin - peer * chunk), chunk)
    else:
        begin, end = _document(bounds, late * chunk)
        if begin >= (last + 1) * chunk:
            return None
        hidden = max(0, begin - last * chunk) + max(0, min(begin - peer * chunk, chunk))
        queries, keys = (chunk, chunk + min(end - late * chunk, chunk)), (hidden, 2 * chunk)
    cu_q, cu_k = (np.array([0, stretch[1] - stretch[0]]) for stretch in (queries, keys))
    return Step(slice(*queries), slice(*keys), _spans(cu_q, cu_k, device))


def _document(bounds: NDArray[np.int64], place: int) -> tuple[int, int]:
    index = int(np.searchsorted(bounds, place, side="right"))
    return int(bounds[index - 1]), int(bounds[index])


def _spans(cu_q: NDArray[np.int64], cu_k: NDArray[np.int64], device: torch.device) -> Spans:
    # Two tensors, also where they are equal: a kernel may take one for "`out` and `lse` are of these keys alone".
    of_queries, of_keys = (torch.from_numpy(cu.astype(np.int32)).to(device) for cu in (cu_q, cu_k))
    return Spans(of_queries, of_keys, int(np.diff(cu_q).max()), int(np.diff(cu_k).max()))


class _Ring(torch.autograd.Function):
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
    following = _pass_on(torch.cat((k, v), -1), group)
    out, lse = kernel.forward(q, k, v, plan.local, scale, True, None)
    merged = out.to(lse.dtype) if any(plan.steps) else out
    for number, step in enumerate(plan.steps, 1):
        keys = following.wait()
        if number < len(plan.steps):
            following = _pass_on(keys, group)
        if step is None:
            continue
        seen, values = keys[step.keys].split((k.shape[-1], v.shape[-1]), -1)
        more, more_lse = kernel.forward(q[step.queries], seen, values, step.spans, scale, False, None)
        _merge(merged[step.queries], lse[step.queries], more, more_lse)
    return merged.to(q.dtype), lse


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
    widths = (k.shape[-1], v.shape[-1])
    following = _pass_on(torch.cat((k, v), -1), group)
    grad_q, grad_k, grad_v = kernel.backward(grad, q, k, v, out, lse, plan.local, scale, True, None)
    total_q = grad_q.to(lse.dtype)
    travelling = _pass_on(torch.cat((grad_k, grad_v), -1).to(lse.dtype), group)
    for number, step in enumerate(plan.steps, 1):
        keys = following.wait()
        if number < len(plan.steps):
            following = _pass_on(keys, group)
        parts = None
        if step is not None:
            mine = step.queries
            seen, values = keys[step.keys].split(widths, -1)
            these = (q[mine], seen, values, out[mine], lse[mine])
            parts = kernel.backward(grad[mine], *these, step.spans, scale, False, None)
        of_keys = travelling.wait()
        if step is not None and parts is not None:
            total_q[step.queries] += parts[0]
            for total, more in zip(of_keys[step.keys].split(widths, -1), parts[1:], strict=True):
                total += more
        travelling = _pass_on(of_keys, group)
    of_k, of_v = travelling.wait().to(k.dtype).split(widths, -1)
    return total_q.to(q.dtype), of_k, of_v


class _Travelling:
    """What the previous rank sends, and what is sent to the next one: kept until both have arrived."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[Any]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> _Travelling:
    """Start to send a tensor to the next rank of the ring and to receive the previous one's."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(tensor)
    following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, tensor, following, group),
        dist.P2POp(dist.irecv, received, previous, group),
    ]
    return _Travelling(tensor, received, dist.batch_isend_irecv(operations))
