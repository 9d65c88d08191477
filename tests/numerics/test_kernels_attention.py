"""Attention kernels as functions: stretches of queries and keys, parts of a ring, and what recomputation keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prl.testing.numerics import assert_parity
from prl_models.blocks.attention import Padded
from prl_models.blocks.cache import selective
from prl_models.blocks.context import kernel_attention
from prl_models.blocks.kernel import Spans
from prl_models.blocks.packing import Packing

CPU = torch.device("cpu")


def spans(queries: list[int], keys: list[int]) -> Spans:
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (queries, keys))
    return Spans(cu_q, cu_k, max(queries), max(keys))


def plain(
    q: Tensor, k: Tensor, v: Tensor, where: Spans, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Token by token, from the definition; nothing seen gives zeros and -inf."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows, totals = [], []
    for i in range(len(where.cu_q) - 1):
        first, last = int(where.cu_q[i]), int(where.cu_q[i + 1])
        begin, end = int(where.cu_k[i]), int(where.cu_k[i + 1])
        for query in range(first, last):
            newest = end - (last - query) if causal else end - 1
            oldest = begin if window is None else max(begin, end - (last - query) - window + 1)
            seen = slice(oldest, max(newest + 1, oldest))
            scores = torch.einsum("hd,mhd->hm", q[query], k[seen]) * scale
            totals.append(torch.logsumexp(scores, -1))
            rows.append(torch.einsum("hm,mhd->hd", scores.softmax(-1), v[seen]))
    return torch.stack(rows), torch.stack(totals)


def inputs(queries: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(*shape, dim, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window"),
    [
        ([3, 1, 7], [3, 1, 7], True, None),
        ([3, 1, 7], [3, 1, 7], True, 2),
        ([3, 2], [5, 9], True, None),
        ([3, 2], [5, 9], False, None),
        ([3, 2, 4], [5, 0, 9], False, None),
        ([6, 2], [3, 9], True, None),
        ([6], [9], True, 4),
    ],
)
def test_the_reference_kernel(queries: list[int], keys: list[int], causal: bool, window: int | None) -> None:
    where = spans(queries, keys)
    q, k, v = inputs(sum(queries), sum(keys))
    expected, total = plain(q, k, v, where, 0.3, causal, window)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected.nan_to_num(0.0) * weight).sum(), (q, k, v))
    with torch.no_grad():
        out, lse = Padded().forward(q, k, v, where, 0.3, causal, window)
        got = Padded().backward(weight, q, k, v, out, lse, where, 0.3, causal, window)
    assert_parity(expected.nan_to_num(0.0), out, 1e-12, "out")
    assert torch.equal(total == float("-inf"), lse == float("-inf"))
    assert_parity(total.nan_to_num(neginf=0.0), lse.nan_to_num(neginf=0.0), 1e-12, "lse")
    for name, reference, value in zip("qkv", wanted, got, strict=True):
        assert_parity(reference.nan_to_num(0.0), value, 1e-12, name)


def test_the_block_mask_of_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward runs on a CPU, not compiled; the rest needs a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    from prl_models.kernels import flex

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    torch.manual_seed(0)
    kernel = flex.Flex()
    for queries, keys, causal, window in (
        ([3, 1, 7], [3, 1, 7], True, None),
        ([3, 1, 7], [3, 1, 7], True, 2),
        ([3, 2], [5, 9], True, None),
        ([3, 2], [5, 9], False, None),
        ([6], [9], True, 4),
    ):
        where = spans(queries, keys)
        q, k, v = (torch.randn(sum(n), heads, 16) for n, heads in ((queries, 4), (keys, 2), (keys, 2)))
        expected, found = (one.forward(q, k, v, where, 0.3, causal, window) for one in (Padded(), kernel))
        for what, reference, value in zip(("out", "lse"), expected, found, strict=True):
            assert_parity(reference, value, 1e-6, what)


class Counting(Padded):
    def __init__(self) -> None:
        self.forwards = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        self.forwards += 1
        return super().forward(q, k, v, spans, scale, causal, window)


def region(x: Tensor, weight: Tensor, where: Spans, kernel: Counting, layers: int = 2) -> Tensor:
    for _ in range(layers):
        q = (x @ weight).unflatten(-1, (2, 4))
        x = x + kernel_attention(q, q[:, :1].tanh(), q[:, 1:], where, 0.5, None, kernel).flatten(1)
    return x


def test_recomputation_takes_attention_from_the_forward_pass() -> None:
    """Two micro-batches are computed before either backward pass; blocks are recomputed last first; a second backward
    pass through the same graph recomputes once more."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    rows = [torch.randn(6, 8, dtype=torch.float64) for _ in range(2)]
    packings = [Packing(np.array(bounds, np.int32), CPU) for bounds in ([0, 2, 6], [0, 5, 6])]

    def loss(kernel: Counting, kept: bool) -> Tensor:
        total = weight.sum() * 0
        for row, packing in zip(rows, packings, strict=True):
            x = row
            for _ in range(3):
                arguments = (x, weight, packing.spans, kernel)
                x = (
                    checkpoint(region, *arguments, use_reentrant=False, context_fn=selective)
                    if kept
                    else region(*arguments)
                )
            total = total + (x * row.roll(1, 0)).sum()
        return total

    (expected,) = torch.autograd.grad(loss(Counting(), kept=False), weight)
    kernel = Counting()
    value = loss(kernel, kept=True)
    assert kernel.forwards == 12
    for _ in range(2):
        (found,) = torch.autograd.grad(value, weight, retain_graph=True)
        assert torch.equal(expected, found)
    assert kernel.forwards == 12, "recomputation computed attention again"


def test_a_region_within_a_region_keeps_its_own() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    row, where = torch.randn(5, 8, dtype=torch.float64), Packing(np.array([0, 3, 5], np.int32), CPU).spans

    def outer(x: Tensor, kept: bool) -> Tensor:
        kernel = Counting()
        x = region(x, weight, where, kernel, layers=1)
        arguments = (x, weight, where, kernel)
        x = checkpoint(region, *arguments, use_reentrant=False, context_fn=selective) if kept else region(*arguments)
        return region(x, weight, where, kernel, layers=1)

    (expected,) = torch.autograd.grad(outer(row, False).square().sum(), weight)
    nested = checkpoint(outer, row, True, use_reentrant=False, context_fn=selective)
    (found,) = torch.autograd.grad(nested.square().sum(), weight)
    assert torch.equal(expected, found)
