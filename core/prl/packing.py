"""Samples into rows of bounded length, rows onto data-parallel ranks. Pure functions of the lengths.

`pack` is first-fit-decreasing: samples go, longest first, into the first row that still has room. It is exact and takes
O(distinct lengths x log rows) steps, because samples of one length fill the same row until it is full. Rows are then
dealt to the ranks: every rank gets the same number of them (data-parallel ranks communicate once per row, so an
unequal number would hang), and about the same estimated work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prl.errors import ConfigError
from prl.flops import active_parameters, attention_width
from prl.model_config import text_config

Rows = list[list[int]]
"""Rows of sample indices."""


@dataclass(frozen=True)
class Cost:
    """Estimated work of a sample of n tokens: `linear * n + quadratic * n^2`.

    The matrix products of a transformer layer of width d cost about 72 d^2 operations a token for forward and backward,
    its causal attention 6 d n: a ratio of 1 / (12 d). The default is that of d = 1024.
    """

    linear: float = 1.0
    quadratic: float = 1.0 / 12288

    def __call__(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        values = lengths.astype(np.float64)
        return values * (self.linear + self.quadratic * values)


DEFAULT_COST = Cost()


def cost_of(config: Mapping[str, Any]) -> Cost:
    """Floating-point operations of forward and backward by a model's config.json: 6 for every parameter that a token
    meets, and 6 h d n in a layer of h heads of d dimensions over a document of n tokens. A layer that does not look at
    the whole document (a window, a state) counts its parameters only; a config without these numbers, as the default.
    """
    try:
        linear = 6.0 * active_parameters(config)
        kinds = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
        return Cost(linear, 6.0 * kinds.count("full_attention") * attention_width(config))
    except (KeyError, TypeError, ValueError):
        return DEFAULT_COST


def model_cost(path: str) -> Cost:
    """Of a model in a local folder; the default for one that is only named."""
    return cost_of(text_config(path))


def pack(lengths: Sequence[int], row_tokens: int, num_ranks: int = 1, cost: Cost | None = None) -> list[Rows]:
    """Pack samples into rows and deal the rows to ranks.

    Args:
        lengths: tokens of every sample, each from 1 to `row_tokens`.
        row_tokens: the most tokens of a row.
        num_ranks: data-parallel ranks.
        cost: the estimate by which ranks are balanced.

    Returns:
        For every rank its rows, each a list of indices into `lengths`. All ranks have the same number of rows; a row is
        empty only where there are too few samples. The result depends on nothing but the arguments.

    Raises:
        ConfigError: a sample does not fit into a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    _check(sizes, row_tokens, num_ranks)
    rows = first_fit_decreasing(sizes, row_tokens)
    if num_ranks == 1:
        return [rows]
    rows = _level(rows, sizes, row_tokens, num_ranks)
    work = (cost or DEFAULT_COST)(sizes)
    return _deal(_fill_grid(rows, work, num_ranks), work, num_ranks)


def first_fit_decreasing(sizes: NDArray[np.int64], capacity: int) -> Rows:
    """Exact first-fit-decreasing; ties keep their order. `sizes` i64[N], each from 1 to `capacity`.

    Free space stands in the leaves of a binary tree whose inner nodes hold the larger of their children, so that the
    first row with room is found by descending. First-fit leaves at most one row half empty or emptier, which bounds
    the leaves.
    """
    if not len(sizes):
        return []
    leaves = 1 << int(2 * int(sizes.sum()) // capacity + 1).bit_length()
    tree = [capacity] * (2 * leaves)
    rows: Rows = []
    order = np.argsort(-sizes, kind="stable")
    descending = sizes[order]
    starts = np.flatnonzero(np.diff(descending, prepend=0)).tolist()
    indices = order.tolist()
    for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
        size = int(descending[start])
        while start < end:
            node = 1
            while node < leaves:
                node *= 2
                if tree[node] < size:
                    node += 1
            fitting = min(end - start, tree[node] // size)
            row = node - leaves
            if row == len(rows):
                rows.append([])
            rows[row] += indices[start : start + fitting]
            start += fitting
            _take(tree, node, size * fitting)
    return rows


def _take(tree: list[int], node: int, amount: int) -> None:
    """Use up `amount` of a leaf and repair the maxima above it."""
    tree[node] -= amount
    node //= 2
    while node:
        left, right = tree[2 * node], tree[2 * node + 1]
        largest = max(right, left)
        if tree[node] == largest:
            return
        tree[node] = largest
        node //= 2


def _level(rows: Rows, sizes: NDArray[np.int64], row_tokens: int, num_ranks: int) -> Rows:
    """Pack again into lower rows where the ranks need more rows than the samples do: first-fit fills all but the last.
    With 64 rows for 61 rows' worth of samples this brings the busiest of 8 ranks from 5% above the mean to 1%."""
    wanted = len(rows) + -len(rows) % num_ranks
    for slack in (1.01, 1.04) if wanted else ():
        capacity = min(row_tokens, max(int(sizes.sum() * slack / wanted), int(sizes.max())))
        lower = first_fit_decreasing(sizes, capacity)
        if len(lower) <= wanted:
            return lower
    return rows


def _fill_grid(rows: Rows, work: NDArray[np.float64], num_ranks: int) -> Rows:
    """Split the most expensive rows until their number is a multiple of the ranks: an empty row would idle its rank."""
    rows = list(rows)
    costs = [float(work[row].sum()) for row in rows]
    missing = -len(rows) % num_ranks
    for _ in range(missing):
        divisible = [i for i, row in enumerate(rows) if len(row) > 1]
        if not divisible:
            break
        heaviest = max(divisible, key=costs.__getitem__)
        halves: tuple[list[int], list[int]] = ([], [])
        loads = [0.0, 0.0]
        for index in sorted(rows[heaviest], key=work.__getitem__, reverse=True):
            lighter = 0 if loads[0] <= loads[1] else 1
            halves[lighter].append(index)
            loads[lighter] += float(work[index])
        rows[heaviest], costs[heaviest] = halves[0], loads[0]
        rows.append(halves[1])
        costs.append(loads[1])
    return rows + [[] for _ in range(-len(rows) % num_ranks)]


def _deal(rows: Rows, work: NDArray[np.float64], num_ranks: int) -> list[Rows]:
    """Longest-processing-time greedy with equal counts: in each round the rank with the least work so far gets the
    most expensive of the next `num_ranks` rows. Rows of one round cost about the same, so that ranks stay in step."""
    costs = [float(work[row].sum()) if row else 0.0 for row in rows]
    ranked = sorted(range(len(rows)), key=lambda i: (-costs[i], i))
    loads = [0.0] * num_ranks
    dealt: list[Rows] = [[] for _ in range(num_ranks)]
    for start in range(0, len(ranked), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda r: (loads[r], r))
        for rank, row in zip(ranks, ranked[start : start + num_ranks], strict=True):
            dealt[rank].append(rows[row])
            loads[rank] += costs[row]
    return dealt


def _check(sizes: NDArray[np.int64], row_tokens: int, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ConfigError([f"cannot pack for {num_ranks} ranks: there must be at least one"])
    if not len(sizes):
        return
    longest, shortest = int(sizes.argmax()), int(sizes.argmin())
    if sizes[longest] > row_tokens:
        problem = f"sample {longest} has {sizes[longest]} tokens and a row of a micro-batch holds {row_tokens}: "
        raise ConfigError([problem + "raise the trainer's row_tokens, or lower sampling.max_tokens"])
    if sizes[shortest] < 1:
        raise ConfigError([f"sample {shortest} has {sizes[shortest]} tokens: there must be at least one"])
