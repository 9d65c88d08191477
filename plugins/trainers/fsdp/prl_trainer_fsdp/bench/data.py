"""Rows for a benchmark: random tokens, every token but a document's first sampled and trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from prl.config.bench import BenchTable
from prl.rows import PackedRow

Score = Callable[[Sequence[Sequence[int]]], list[list[float]]]

OFF_POLICY = 0.02
"""Standard deviation of what the engine's log-probabilities differ by: that of bfloat16 between two implementations."""


def synthetic_rows(
    table: BenchTable, vocab_size: int, seed: tuple[int, ...], *, supervised: bool = False
) -> list[PackedRow]:
    """`table.rows` rows of `table.documents`; log-probabilities of sampling are those of `with_sampler`."""
    rng = np.random.default_rng(seed)
    lengths = np.array(table.documents, np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    trained = np.ones(total, np.bool_)
    trained[ends - lengths] = False
    nothing = np.zeros(total, np.float32)
    rows = []
    for _ in range(table.rows):
        advantages = np.repeat(rng.normal(size=len(lengths)), lengths)  # one for each answer, as a group gives them
        rows.append(
            PackedRow(
                token_ids=rng.integers(0, vocab_size, total).astype(np.int32),
                position_ids=(np.arange(total) - np.repeat(ends - lengths, lengths)).astype(np.int32),
                cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
                sampled=np.zeros(total, np.bool_) if supervised else trained,
                logprobs=nothing,
                versions=np.where(trained & (not supervised), 0, -1).astype(np.int32),
                temperatures=np.ones(total, np.float32),
                advantages=nothing if supervised else advantages.astype(np.float32),
                rl=nothing if supervised else trained.astype(np.float32),
                ce=trained.astype(np.float32) if supervised else nothing,
                ref_kl=nothing,
            )
        )
    return rows


def with_sampler(row: PackedRow, score: Score, seed: tuple[int, ...]) -> PackedRow:
    """The row with log-probabilities of a sampler that is almost the policy, as `score` gives them."""
    rng = np.random.default_rng((*seed, 1))
    documents = [part.tolist() for part in np.split(row.token_ids, row.cu_seqlens[1:-1])]
    scored = np.concatenate([np.asarray(values) for values in score(documents)])
    noise = OFF_POLICY * rng.normal(size=len(scored))
    logprobs = np.where(row.sampled, np.minimum(scored + noise, 0.0), 0.0)
    return dataclasses.replace(row, logprobs=logprobs.astype(np.float32))


def denominators(rows: Sequence[PackedRow], replicas: int) -> dict[str, float]:
    """Of the whole step, where every one of `replicas` data-parallel ranks has such rows."""
    return {
        name: replicas * float(sum(getattr(row, name).sum() for row in rows)) or 1.0 for name in ("rl", "ce", "ref_kl")
    }
