"""A row of packed samples as flat arrays: what the trainer's forward pass and loss are computed on. numpy only.

Index t of every array refers to token t itself: its loss uses the logits at t - 1. So the first token of a document
never has a loss, and its weights are 0 in `assemble` and left out in `denominators`; the two always agree.
`rl` and `ref_kl` weigh sampled tokens only; `ce` may sit on any token, a prompt's too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from prl.messages import TrainSample
from prl.types import Credit, Runs, SampleBody, SampleHeader

COMPONENTS = ("rl", "ce", "ref_kl")

_decode_body = msgspec.msgpack.Decoder(SampleBody).decode


@dataclass(frozen=True)
class PackedRow:
    """D documents (samples) one after another, T tokens in all.

    token_ids i32[T], position_ids i32[T] (from 0 in every document), cu_seqlens i32[D + 1], sampled bool[T],
    logprobs f32[T] and versions i32[T] of sampling (0 and -1 where not sampled), temperatures f32[T], advantages
    f32[T], and the weights rl, ce, ref_kl f32[T].
    """

    token_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rl: NDArray[np.float32]
    ce: NDArray[np.float32]
    ref_kl: NDArray[np.float32]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_documents(self) -> int:
        return len(self.cu_seqlens) - 1


def assemble(row: Sequence[TrainSample]) -> PackedRow:
    """Open the bodies of a row and lay everything out flat. An empty row gives arrays of length 0.

    Raises:
        ValueError: a body, its header and its credit do not describe the same tokens.
    """
    bodies = [_decode_body(sample.body) for sample in row]
    lengths = np.fromiter((sample.header.num_tokens for sample in row), np.int64, len(row))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if row else 0
    _check_bodies(row, bodies)
    sampled = np.frombuffer(b"".join([body.sampled for body in bodies]), np.bool_)
    _check_runs(row, starts, sampled)
    weighted = sampled.copy()
    weighted[starts] = False
    rl, ref_kl = (_stream(row, name, ends) * weighted for name in ("rl", "ref_kl"))
    ce = _stream(row, "ce", ends)
    ce[starts] = 0.0
    return PackedRow(
        token_ids=np.frombuffer(b"".join([body.token_ids for body in bodies]), "<i4"),
        position_ids=(np.arange(total) - np.repeat(starts, lengths)).astype(np.int32),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        sampled=sampled,
        logprobs=np.frombuffer(b"".join([body.logprobs for body in bodies]), "<f4"),
        versions=np.frombuffer(b"".join([body.versions for body in bodies]), "<i4"),
        temperatures=np.repeat(np.array([s.header.temperature for s in row], np.float32), lengths),
        advantages=_stream(row, "advantages", ends),
        rl=rl,
        ce=ce,
        ref_kl=ref_kl,
    )


def denominators(samples: Iterable[tuple[SampleHeader, Credit]]) -> dict[str, float]:
    """Sum of every component's weights over the tokens that have a loss, from headers alone; never 0.

    The sum is exact (fsum), so it does not depend on the order of the samples.
    """
    parts: dict[str, list[float]] = {name: [] for name in COMPONENTS}
    for header, credit in samples:
        if credit.rl:
            parts["rl"].append(_weight_on_runs(credit.rl, header.runs))
        if credit.ref_kl:
            parts["ref_kl"].append(_weight_on_runs(credit.ref_kl, header.runs))
        if credit.ce:
            parts["ce"].append(_weight_on_runs(credit.ce, ((0, header.num_tokens),)))
    return {name: math.fsum(values) or 1.0 for name, values in parts.items()}


def _weight_on_runs(weights: Runs, runs: Iterable[tuple[int, int]]) -> float:
    """Total weight on the tokens of `runs`, without the document's first token."""
    total = 0.0
    for start, length in runs:
        first, last = max(start, 1), start + length
        at = 0
        for count, weight in weights:
            covered = min(at + count, last) - max(at, first)
            if covered > 0:
                total += covered * weight
            at += count
            if at >= last:
                break
    return total


def _stream(row: Sequence[TrainSample], name: str, ends: NDArray[np.int64]) -> NDArray[np.float32]:
    """One of the credit's run-length streams over the whole row, f32[T]."""
    counts: list[int] = []
    values: list[float] = []
    pieces: list[int] = []
    for sample in row:
        runs: Runs = getattr(sample.credit, name) or ((sample.header.num_tokens, 0.0),)
        pieces.append(len(runs))
        for count, value in runs:
            counts.append(count)
            values.append(value)
    repeats = np.array(counts, np.int64)
    reached = np.cumsum(repeats)[np.cumsum(np.array(pieces, np.int64)) - 1] if row else ends
    if not np.array_equal(reached, ends):
        at = int(np.flatnonzero(reached != ends)[0])
        runs = getattr(row[at].credit, name)
        raise ValueError(
            f"credit stream {name!r} of sample {at} covers {sum(count for count, _ in runs)} tokens of "
            f"{row[at].header.num_tokens}: an algorithm must return run lengths that add up to the sample"
        )
    return np.repeat(np.array(values, np.float32), repeats)


def _check_bodies(row: Sequence[TrainSample], bodies: Sequence[SampleBody]) -> None:
    for index, (sample, body) in enumerate(zip(row, bodies, strict=True)):
        tokens = sample.header.num_tokens
        if (
            len(body.token_ids) != 4 * tokens
            or len(body.sampled) != tokens
            or len(body.logprobs) != 4 * tokens
            or len(body.versions) != 4 * tokens
        ):
            raise ValueError(
                f"the body of sample {index} does not have the {tokens} tokens of its header: it holds "
                f"{len(body.token_ids)} bytes of token ids, {len(body.sampled)} of flags, {len(body.logprobs)} of "
                f"log-probabilities, {len(body.versions)} of versions"
            )


def _check_runs(row: Sequence[TrainSample], starts: NDArray[np.int64], sampled: NDArray[np.bool_]) -> None:
    """Denominators come from the headers' runs, weights from the bodies' flags: they must be the same tokens."""
    if not row:
        return
    counts = [len(sample.header.runs) for sample in row]
    runs = np.array([run for sample in row for run in sample.header.runs], np.int64).reshape(-1, 2)
    firsts = runs[:, 0] + np.repeat(starts, counts)
    edges = np.zeros(len(sampled) + 1, np.int32)
    np.add.at(edges, np.clip(firsts, 0, len(sampled)), 1)
    np.add.at(edges, np.clip(firsts + runs[:, 1], 0, len(sampled)), -1)
    differing = np.flatnonzero(np.cumsum(edges[:-1]) != sampled)
    if len(differing):
        at = int(np.searchsorted(starts, differing[0], side="right")) - 1
        raise ValueError(
            f"token {differing[0] - starts[at]} of sample {at}: header runs {row[at].header.runs} and body disagree "
            f"about whether it was sampled"
        )
