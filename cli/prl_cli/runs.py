"""Run directories from outside: finding one, telling whether it is alive, reading its small files.

A run is alive while the process that started it holds the lock on `control/lock`. The lock ends with that process,
however it ends, and the files beside it are left for a person to read.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.errors import UsageError
from prl.rundir import RunDir

RUNS_VARIABLE = "PRL_RUNS_DIR"


def default_runs_dir() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def find(name: str, runs_dir: Path | None = None) -> RunDir:
    """The run that a person means: a path, or a name below the folder of runs.

    Raises:
        UsageError: there is no such run.
    """
    root = runs_dir or default_runs_dir()
    for candidate in (Path(name), root / name):
        if is_run(candidate):
            return RunDir(candidate.resolve())
    names = [run.name for run in all_runs(root)]
    close = difflib.get_close_matches(name, names, 1)
    if close:
        hint = f"did you mean {close[0]!r}?"
    elif names:
        hint = f"runs there: {', '.join(names[:10])}"
    else:
        hint = f"there are no runs in {root}/ (--runs-dir or {RUNS_VARIABLE} names another folder)"
    raise UsageError(f"no run {name!r}: {hint}")


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory: it has a control folder, and a configuration or at least the lock that is
    taken before one is written."""
    run = RunDir(path)
    return run.control.is_dir() and (run.config.is_file() or lock_file(run).is_file())


def all_runs(root: Path) -> list[RunDir]:
    """The runs below a folder, the latest last."""
    if not root.is_dir():
        return []
    found = [RunDir(path.resolve()) for path in root.iterdir() if is_run(path)]
    return sorted(found, key=started_at)


def started_at(run: RunDir) -> float:
    """Unix time of the last start, which writes the configuration."""
    file = run.config if run.config.is_file() else run.control
    return file.stat().st_mtime


def lock_file(run: RunDir) -> Path:
    return run.control / "lock"


@contextlib.contextmanager
def held(run: RunDir) -> Iterator[None]:
    """Hold the run: nobody else may start, remove or resume it until the block ends.

    Raises:
        UsageError: another process holds it.
    """
    path = lock_file(run)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"run {run.name!r} is going on: {_holder(run)}; `prl stop {run.name}` ends it") from None
        os.ftruncate(descriptor, 0)
        owner = {"pid": os.getpid(), "host": os.uname().nodename, "since": time.time()}
        os.write(descriptor, json.dumps(owner).encode())
        yield
    finally:
        os.close(descriptor)


def is_alive(run: RunDir) -> bool:
    """Whether some process holds the run."""
    try:
        descriptor = os.open(lock_file(run), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _holder(run: RunDir) -> str:
    owner = read_json(lock_file(run))
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')} holds it"


def remove(run: RunDir) -> None:
    """Delete a run directory.

    Raises:
        UsageError: it is not one, is only a link to one, or the run is going on.
    """
    if not is_run(run.path):
        raise UsageError(
            f"{run.path} is not a run directory: it has no control/ with a lock and no config.json; nothing was removed"
        )
    if run.path.is_symlink():
        raise UsageError(f"{run.path} is a link to {run.path.resolve()}: remove the link, nothing behind it is touched")
    with held(run):
        shutil.rmtree(run.path)


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON file; {} when it is missing or is just being written."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


ENDED = ("completed", "stopped", "failed", "preempted")
"""Last states of a run; in any other one there must be a process."""


def status(run: RunDir) -> dict[str, Any]:
    """status.json, with the state corrected: "paused", and "dead" when the process that wrote it is gone."""
    value = read_json(run.status)
    if value and value.get("state") not in ENDED:
        if not is_alive(run):
            value["state"] = "dead"
        elif value.get("paused"):
            value["state"] = "paused"
    return value


def checkpoint_steps(run: RunDir) -> list[int]:
    """Steps of the complete checkpoints, ascending: those with a manifest."""
    steps = []
    for folder in run.checkpoints.glob("step_*"):
        suffix = folder.name.removeprefix("step_")
        if suffix.isdigit() and (folder / "MANIFEST.json").is_file():
            steps.append(int(suffix))
    return sorted(steps)
