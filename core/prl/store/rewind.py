"""Before a run goes on: repair what a crash tore, and drop what was written after the checkpoint that it continues
from, so that nothing counts twice.

A file of rollouts holds more than its step's: an evaluation that ended late, and episodes that no step used, are filed
with the step that is sealed next. So what goes is decided row by row, and what stays of a later file moves into that
of the checkpoint's step; what no file holds yet stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import msgspec

from prl.rundir import RunDir
from prl.store.files import atomic_write, complete_lines, repair_lines, store_error
from prl.store.records import INDEX_FILE, OPEN_FILE, kind_of, read_frames, sealed_path, sealed_steps
from prl.store.writer import rewrite_open

_decode_json = msgspec.json.Decoder().decode
_encode_json = msgspec.json.Encoder().encode

KEY = ["kind", "step", "group_id", "episode_id"]

Settled = Callable[[int], bool]
"""Whether a group of this number had left the loop when the checkpoint was taken: it is in its counts."""


def repair(run_dir: RunDir) -> list[str]:
    """Cut off last lines that were never finished, and say so.

    Raises:
        StoreError: a file cannot be changed.
    """
    paths = (run_dir.metrics, run_dir.events, run_dir.rollouts / INDEX_FILE)
    removed = {path: repair_lines(path) for path in paths}
    return [
        f"{path}: the last line was cut off by a crash, its {count} bytes were removed"
        for path, count in removed.items()
        if count
    ]


def rewind(
    run_dir: RunDir, step: int, *, evaluated_again: bool = False, settled: Settled = lambda group: False
) -> dict[str, int]:
    """Drop metrics, index lines and rollouts of what was done after `step`. Events stay: they tell what happened.

    Kept are steps up to `step`; evaluations up to `step` whose metrics were written, unless `evaluated_again` drops
    that of `step` itself; and episodes that no step used, if their group was `settled`. The version of `step` is
    installed again, so what was measured of that goes.

    Every file is replaced as a whole, so that this may be interrupted and repeated. Call it before a StoreWriter opens.

    Returns:
        How many metrics lines, index lines, sealed files and unsealed episodes were dropped.

    Raises:
        StoreError: a file cannot be read or replaced.
    """
    metrics = _filter_metrics(run_dir.metrics, step, evaluated_again)
    rollouts = run_dir.rollouts
    sealed = sealed_steps(rollouts)
    keep = _Keep(step, _evaluated(run_dir.metrics), settled)
    later = {number: path for number, path in sealed.items() if number > step}
    if later:
        _salvage(rollouts, step, later.values(), keep)
    unsealed = _filter_open(rollouts, step, max(sealed, default=0), keep)
    index = _filter_index(rollouts / INDEX_FILE, step, later, keep)
    for path in later.values():
        try:
            path.unlink()
        except OSError as error:
            raise store_error("remove", path, error) from error
    return {"metrics": metrics, "index": index, "sealed": len(later), "unsealed": unsealed}


class _Keep:
    """Whether a rollout that was filed after the checkpoint's step belongs before it."""

    def __init__(self, step: int, evaluated: set[int], settled: Settled) -> None:
        self._step = step
        self._evaluated = evaluated
        self._settled = settled

    def __call__(self, kind: str, step: int | None, group: int) -> bool:
        if step is None:
            return self._settled(group)
        return step <= self._step and (kind != "eval" or step in self._evaluated)


def _evaluated(metrics: Path) -> set[int]:
    """Steps with a line of evaluation."""
    found = set()
    for line in _lines(metrics):
        value = _decoded(line)
        if value is not None and kind_of(value) == "evaluation":
            found.add(int(value["step"]))
    return found


def _salvage(rollouts: Path, step: int, later: Iterable[Path], keep: _Keep) -> None:
    """Add the rows of later files that stay to the file of `step`; those it has from an earlier attempt are not added
    again. A file that cannot be read was lost before: the reader leaves it out, too."""
    import pyarrow as pa

    from prl.store.columns import read_parquet, write_parquet

    target = sealed_path(rollouts, step)
    tables = [read_parquet(target)] if target.exists() else []
    there = {key for table in tables for key in _keys(table)}
    found = []
    for path in later:
        try:
            wanted = [key not in there and keep(*key[:3]) for key in _keys(read_parquet(path, KEY))]
            if any(wanted):
                found.append(read_parquet(path).filter(pa.array(wanted)))
        except (OSError, pa.ArrowException):
            continue
    if found:
        write_parquet(pa.concat_tables([*tables, *found], promote_options="default"), target)


def _keys(table: Any) -> list[tuple[Any, ...]]:
    """Of every row. The rows of an episode, and of a group, are handed over together."""
    return list(zip(*(table[name].to_pylist() for name in KEY), strict=True))


def _filter_open(rollouts: Path, step: int, sealed: int, keep: _Keep) -> int:
    """Of the frames that no file holds yet. Returns how many went."""
    path = rollouts / OPEN_FILE
    if not path.exists():
        return 0
    frames = [frame for frame, _ in read_frames(path.read_bytes())]
    kept = [
        frame
        for frame in frames
        if frame.file > sealed and (frame.file <= step or keep(frame.record.kind, frame.step, frame.record.group_id))
    ]
    if len(kept) < len(frames):
        rewrite_open(rollouts, kept)
    return len(frames) - len(kept)


def _filter_index(path: Path, step: int, later: Container[int], keep: _Keep) -> int:
    lines = _lines(path)
    kept = []
    for line in lines:
        value = _decoded(line)
        if value is None or not value.keys() >= {"file", "kind", "step", "group_id"}:
            continue
        if value["file"] <= step:
            kept.append(line)
        elif keep(value["kind"], value["step"], value["group_id"]):
            kept.append(_encode_json({**value, "file": step}) if value["file"] in later else line)
    _replace(path, kept)
    return len(lines) - len(kept)


def _filter_metrics(path: Path, step: int, evaluated_again: bool) -> int:
    lines = _lines(path)
    again = {"probes", "evaluation"} if evaluated_again else {"probes"}
    kept = []
    for line in lines:
        value = _decoded(line)
        if value is not None:
            number = int(value.get("step", step + 1))
            if number < step or (number == step and kind_of(value) not in again):
                kept.append(line)
    _replace(path, kept)
    return len(lines) - len(kept)


def _lines(path: Path) -> list[bytes]:
    try:
        return complete_lines(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error("read", path, error) from error


def _decoded(line: bytes) -> dict[str, Any] | None:
    """None for a damaged line."""
    try:
        value = _decode_json(line)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _replace(path: Path, lines: list[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    if path.exists() and path.read_bytes() != content:
        atomic_write(path, content)
