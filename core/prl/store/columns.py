"""Rollouts as Arrow tables and Parquet files. This is the only module of the core that imports pyarrow eagerly.

Columns are built at once for a whole step: token streams stay bytes until one `numpy.frombuffer` over all of them, so
that no Python object is made per token.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prl import faults
from prl.store.files import WRITE_POINT, fsync_directory, store_error
from prl.store.records import Frame, RolloutRecord
from prl.types import SCHEMA_VERSION, Credit, RolloutHeader, Runs, SampleBody, SampleHeader

SCALARS: list[tuple[str, pa.DataType]] = [
    ("episode_id", pa.int64()),
    ("step", pa.int64()),
    ("env", pa.string()),
    ("task_id", pa.string()),
    ("group_id", pa.int64()),
    ("agent", pa.string()),
    ("kind", pa.string()),
    ("status", pa.string()),
    ("messages", pa.string()),
    ("rewards", pa.string()),
    ("reward", pa.float64()),
    ("metrics", pa.string()),
    ("stop_reason", pa.string()),
    ("truncated", pa.bool_()),
    ("num_turns", pa.int32()),
    ("seconds", pa.float64()),
    ("error", pa.string()),
]
STREAMS: list[tuple[str, pa.DataType, str]] = [
    ("token_ids", pa.int32(), "<i4"),
    ("sampled", pa.bool_(), "?"),
    ("logprobs", pa.float32(), "<f4"),
    ("versions", pa.int32(), "<i4"),
]


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


SCHEMA = pa.schema(
    [pa.field(name, kind) for name, kind in SCALARS]
    + [pa.field("sample_lengths", _list(pa.int32()))]
    + [pa.field(name, _list(kind)) for name, kind, _ in STREAMS]
    + [pa.field("advantages", _list(pa.float32()))],
    metadata={"prl.schema": str(SCHEMA_VERSION)},
)

_DICTIONARY = ["env", "task_id", "agent", "kind", "status", "rewards", "stop_reason", "error"]

_decode_body = msgspec.msgpack.Decoder(SampleBody).decode
_decode_transcript = msgspec.msgpack.Decoder(list[list[dict[str, Any]]]).decode
_json = msgspec.json.Encoder().encode


def table_of(frames: Iterable[Frame]) -> pa.Table:
    """One row per rollout. `messages`, `rewards` and `metrics` are JSON; a conversation that had to start another
    sample has all of them one after another, their lengths in `sample_lengths`; `advantages` is null without credit."""
    scalars: list[tuple[Any, ...]] = []
    bodies: list[SampleBody] = []
    counts: list[int] = []
    lengths: list[int] = []
    credits: list[list[Runs] | None] = []
    for frame in frames:
        record = frame.record
        bodies += map(_decode_body, record.bodies)
        remaining = iter(record.credits)
        for rollout, messages in zip(record.rollouts or (None,), _transcripts(record), strict=True):
            scalars.append(_scalars(frame.step, record, rollout, messages))
            samples = rollout.samples if rollout is not None else ()
            counts.append(len(samples))
            lengths += [sample.num_tokens for sample in samples]
            has_credit = bool(record.credits) and rollout is not None and rollout.trainable
            credits.append([_runs(next(remaining), sample) for sample in samples] if has_credit else None)
    return _assemble(scalars, bodies, counts, lengths, credits)


def _transcripts(record: RolloutRecord) -> list[bytes]:
    """The messages of every rollout as JSON."""
    expected = max(1, len(record.rollouts))
    if not record.transcript:
        return [b"[]"] * expected
    found = [_json(messages) for messages in _decode_transcript(record.transcript)]
    return found if len(found) == expected else (found + [b"[]"] * expected)[:expected]


def _scalars(
    step: int | None, record: RolloutRecord, rollout: RolloutHeader | None, messages: bytes
) -> tuple[Any, ...]:
    return (
        record.episode_id,
        step,
        record.env,
        record.task_id,
        record.group_id,
        rollout.agent if rollout is not None else None,
        record.kind,
        record.status,
        messages,
        _json(rollout.rewards) if rollout is not None else b"{}",
        rollout.reward if rollout is not None else None,
        _json(record.metrics) if record.metrics else b"{}",
        rollout.stop_reason if rollout is not None else None,
        rollout.truncated if rollout is not None else False,
        rollout.num_turns if rollout is not None else 0,
        record.seconds,
        record.error,
    )


def _assemble(
    scalars: list[tuple[Any, ...]],
    bodies: list[SampleBody],
    counts: list[int],
    lengths: list[int],
    credits: list[list[Runs] | None],
) -> pa.Table:
    columns = list(zip(*scalars, strict=True)) or [()] * len(SCALARS)
    arrays: list[pa.Array] = [pa.array(values, kind) for values, (_, kind) in zip(columns, SCALARS, strict=True)]
    samples = np.array(lengths, np.int32)
    sample_offsets = _offsets(counts)
    arrays.append(_list_array(sample_offsets, samples, pa.int32()))
    offsets = np.concatenate([[0], np.cumsum(samples)]).astype(np.int32)[sample_offsets]
    for name, kind, dtype in STREAMS:
        values = np.frombuffer(b"".join([getattr(body, name) for body in bodies]), dtype)
        if len(values) != offsets[-1]:
            raise ValueError(f"bodies hold {len(values)} {name}, their headers promise {offsets[-1]}")
        arrays.append(_list_array(offsets, values, kind))
    arrays.append(_advantages(credits))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _runs(credit: Credit | None, sample: SampleHeader) -> Runs:
    """Advantages of one sample, 0 where it got none: rows stay aligned with their tokens."""
    return (credit.advantages if credit is not None else ()) or ((sample.num_tokens, 0.0),)


def _advantages(credits: list[list[Runs] | None]) -> pa.Array:
    runs = [list(chain.from_iterable(group)) if group else [] for group in credits]
    flat = list(chain.from_iterable(runs))
    values = np.repeat(
        np.array([value for _, value in flat], np.float32), np.array([count for count, _ in flat], np.int64)
    )
    missing = pa.array([group is None for group in credits], pa.bool_())
    totals = [sum(count for count, _ in row) for row in runs]
    return _list_array(_offsets(totals), values, pa.float32(), missing)


def _list_array(offsets: Any, values: Any, kind: pa.DataType, missing: pa.Array | None = None) -> pa.Array:
    flat = pa.array(values, kind)
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=_list(kind), mask=missing)


def _offsets(counts: Sequence[int]) -> Any:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write beside the final name, sync, rename: the file is there as a whole or not at all.

    Raises:
        StoreError: it cannot be written; nothing of it is left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        faults.point(WRITE_POINT)
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            compression_level=1,
            use_dictionary=_DICTIONARY,  # for token streams it costs more time than it saves bytes
            use_byte_stream_split=["logprobs.list.element"],
            write_statistics=["episode_id", "step", "group_id", "reward"],
        )
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise store_error("write", path, error) from error


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Raises: OSError, pa.ArrowException: it is not readable."""
    return pq.read_table(path, columns=columns, partitioning=None)
