"""Before a run goes on: repair what a crash tore, and drop what was written after the checkpoint that it continues
from, so that nothing counts twice.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prl.rundir import RunDir
from prl.store.files import atomic_write, complete_lines, repair_lines, store_error
from prl.store.records import INDEX_FILE, OPEN_FILE, read_frames, sealed_steps
from prl.store.writer import rewrite_open

_decode_json = msgspec.json.Decoder().decode


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


def rewind(run_dir: RunDir, step: int, *, evaluated_again: bool = False) -> dict[str, int]:
    """Drop metrics, index lines and rollouts of steps after `step`. Events stay: they tell what happened.

    With `evaluated_again` the evaluation of `step` itself goes too.

    Every file is replaced as a whole, so that this may be interrupted and repeated. Call it before a StoreWriter opens.

    Returns:
        How many metrics lines, index lines, sealed files and unsealed episodes were dropped.

    Raises:
        StoreError: a file cannot be replaced.
    """
    rollouts = run_dir.rollouts
    dropped = {
        "metrics": _filter_lines(run_dir.metrics, "step", step, evaluated_again),
        "index": _filter_lines(rollouts / INDEX_FILE, "file", step),
        "sealed": 0,
        "unsealed": 0,
    }
    path = rollouts / OPEN_FILE
    if path.exists():
        data = path.read_bytes()
        frames = [frame for frame, _ in read_frames(data)]
        kept = [frame for frame in frames if frame.file <= step]
        if len(kept) < len(frames):
            rewrite_open(rollouts, kept)
        dropped["unsealed"] = len(frames) - len(kept)
    for number, sealed in sealed_steps(rollouts).items():
        if number > step:
            try:
                sealed.unlink()
            except OSError as error:
                raise store_error("remove", sealed, error) from error
            dropped["sealed"] += 1
    return dropped


def _filter_lines(path: Path, key: str, limit: int, evaluated_again: bool = False) -> int:
    """Keep the lines whose `key` is at most `limit`; damaged lines go too. Returns how many were dropped."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error("read", path, error) from error
    lines = complete_lines(data)
    kept = [line for line in lines if _is_kept(line, key, limit, evaluated_again)]
    content = b"".join(line + b"\n" for line in kept)
    if content != data:
        atomic_write(path, content)
    return len(lines) - len(kept)


def _is_kept(line: bytes, key: str, limit: int, evaluated_again: bool) -> bool:
    try:
        value = _decode_json(line)
    except msgspec.DecodeError:
        return False
    if not isinstance(value, dict):
        return False
    number = int(value.get(key, limit + 1))
    is_evaluation = any(name.startswith("eval/") for name in value)
    return number < limit or (number == limit and not (evaluated_again and is_evaluation))
