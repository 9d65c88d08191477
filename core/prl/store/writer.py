"""The one writer of a run directory: a thread with a bounded queue, so that no disk ever blocks the event loop.

Calls only append to the queue (under a microsecond) and never wait. The thread sleeps until something is queued,
gathers for `GATHER_S`, and then writes everything at once: waking for every record would cost a switch of the
interpreter lock each. Records of a step wait in memory and, against a crash, in `open.msgpack`; `seal` turns them into
one Parquet file.

When a write fails the writer stops where the files are good and keeps the reason in `error`; later calls raise it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from prl.errors import StoreError
from prl.rundir import RunDir
from prl.store.files import AppendFile, atomic_write, repair_lines, store_error
from prl.store.records import (
    INDEX_FILE,
    OPEN_FILE,
    Frame,
    RolloutRecord,
    encode_frame,
    index_lines,
    read_frames,
    sealed_path,
    sealed_steps,
)

GATHER_S = 0.05

_json = msgspec.json.Encoder().encode
_Job = tuple[Callable[..., None], tuple[Any, ...]]


class StoreWriter:
    """Writes metrics, events, rollouts, status and summary of one run.

    Args:
        run_dir: of the run. What a crash left behind is repaired: torn lines are cut off, unsealed rollouts taken over.
        queue: calls that may wait for the disk before `ready` waits for them.
        rollouts: whether rollouts are kept at all. every: keep those of every n-th step.

    Raises:
        StoreError: the directory cannot be written.
    """

    def __init__(self, run_dir: RunDir, *, queue: int = 20_000, rollouts: bool = True, every: int = 1) -> None:
        self.run_dir = run_dir
        self.error: StoreError | None = None
        self._capacity = queue
        self._keep = rollouts
        self._every = every
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._waiters: deque[Callable[[], None]] = deque()
        self._closed = False
        self._lines = bytearray()
        self._frames = bytearray()
        for path in (run_dir.metrics, run_dir.events, run_dir.rollouts / INDEX_FILE):
            repair_lines(path)
        self._metrics = AppendFile(run_dir.metrics)
        self._events = AppendFile(run_dir.events)
        self._index = AppendFile(run_dir.rollouts / INDEX_FILE)
        self._pending, self._sealed = _recover(run_dir.rollouts)
        self._open = AppendFile(run_dir.rollouts / OPEN_FILE)
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    # --- called by the loop; none of these waits ---

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`: `step`, `time` (Unix seconds) and the values, named like "loss/mean"."""
        self._put(self._write_metrics, {"step": step, "time": time.time(), **values})

    def event(self, kind: str, **data: Any) -> None:
        """One line of `events.jsonl`: `time`, `kind` and whatever tells what happened."""
        self._put(self._write_line, self._events, {"time": time.time(), "kind": kind, **data})

    def rollout(self, step: int | None, record: RolloutRecord) -> None:
        """Keep an episode. `step` is the one that trained (or evaluated) it; None when none did: it is filed with the
        step that is sealed next. The record must not be changed afterwards."""
        if self._keep:
            self._put(self._take_rollout, step, record)

    def seal(self, step: int) -> None:
        """Every rollout of this step was handed over: write its Parquet file."""
        if self._keep:
            self._put(self._seal, step)

    def status(self, document: Any) -> None:
        """Replace `status.json`."""
        self._put(self._write_document, self.run_dir.status, document, False)

    def summary(self, document: Any) -> None:
        """Replace `summary.json`."""
        self._put(self._write_document, self.run_dir.summary, document, True)

    # --- waiting ---

    @property
    def backlog(self) -> int:
        """Calls that wait for the disk."""
        return len(self._jobs)

    async def ready(self) -> None:
        """Wait until the queue has room again. Raises StoreError when nothing can be written any more."""
        while len(self._jobs) >= self._capacity and self.error is None:
            await self.drained()
        self._check()

    async def drained(self) -> None:
        """Wait until everything handed over so far is in the files."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not done.done():
                done.set_result(None)

        def announce() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(resolve)

        self._put(self._announce, announce)
        self._hurry.set()
        await done
        self._check()

    def flush(self, timeout: float = 60.0) -> None:
        """Block until everything handed over so far is in the files. Not for the event loop's thread.

        Raises:
            StoreError: it could not be written, or not within `timeout` seconds.
        """
        done = threading.Event()
        self._put(self._announce, done.set)
        self._hurry.set()
        if not done.wait(timeout):
            raise StoreError(
                f"{self.run_dir.path} took no data for {timeout:g} s with {self.backlog} records waiting: "
                "check the disk or the mount"
            )
        self._check()

    def close(self, timeout: float = 60.0) -> None:
        """Write what is queued and end the thread. Rollouts that were not sealed stay in `open.msgpack`."""
        if self._closed:
            return
        self._closed = True
        self._jobs.append((self._stop, ()))
        self._wake.set()
        self._hurry.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise StoreError(f"{self.run_dir.path} took no data for {timeout:g} s: check the disk or the mount")
        for file in (self._metrics, self._events, self._index, self._open):
            file.close()
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise StoreError(str(self.error)) from self.error

    def _put(self, job: Callable[..., None], *arguments: Any) -> None:
        self._check()
        if self._closed:
            raise StoreError(f"the store of {self.run_dir.path} is closed")
        self._jobs.append((job, arguments))
        if not self._wake.is_set():
            self._wake.set()

    # --- the thread ---

    def _run(self) -> None:
        self._running = True
        while self._running:
            self._wake.wait()
            self._hurry.wait(GATHER_S)
            self._wake.clear()
            self._hurry.clear()
            while self._jobs:
                job, arguments = self._jobs.popleft()
                self._guarded(job, arguments)
            self._guarded(self._flush_rollouts, ())

    def _guarded(self, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Run a job; after a failure nothing but answering those who wait is done any more."""
        if self.error is not None and job not in (self._announce, self._stop):
            return
        try:
            job(*arguments)
        except StoreError as error:
            self.error = error
        except OSError as error:
            self.error = store_error("write", Path(error.filename or self.run_dir.path), error)
        except Exception as error:  # a record that cannot be encoded: say so rather than end the thread silently
            self.error = StoreError(f"cannot store {job.__name__.strip('_')} in {self.run_dir.path}: {error!r}")

    def _stop(self) -> None:
        self._running = False

    def _announce(self, announce: Callable[[], None]) -> None:
        if self.error is None:
            self._guarded(self._flush_rollouts, ())
        announce()

    def _write_metrics(self, line: dict[str, Any]) -> None:
        """After the rollouts that were handed over before: an evaluation whose means are there has its episodes, too,
        whenever the process is killed."""
        self._flush_rollouts()
        self._write_line(self._metrics, line)

    def _write_line(self, file: AppendFile, line: dict[str, Any]) -> None:
        file.append(_json(line) + b"\n")

    def _write_document(self, path: Path, document: Any, durable: bool) -> None:
        atomic_write(path, msgspec.json.format(_json(document), indent=2) + b"\n", durable=durable)

    def _take_rollout(self, step: int | None, record: RolloutRecord) -> None:
        file = self._sealed + 1 if step is None else max(step, self._sealed + 1)
        if file % self._every:
            return
        frame = Frame(file, step, record)
        self._pending.append(frame)
        self._frames += encode_frame(frame)
        self._lines += index_lines(frame)

    def _flush_rollouts(self) -> None:
        if self._frames:
            self._open.append(bytes(self._frames))
            self._frames.clear()
        if self._lines:
            self._index.append(bytes(self._lines))
            self._lines.clear()

    def _seal(self, step: int) -> None:
        self._flush_rollouts()
        self._sealed = max(self._sealed, step)
        sealed = [frame for frame in self._pending if frame.file <= step]
        if not sealed:
            return
        from prl.store.columns import table_of, write_parquet

        write_parquet(table_of(sealed), sealed_path(self.run_dir.rollouts, step))
        self._pending = [frame for frame in self._pending if frame.file > step]
        self._open.close()
        rewrite_open(self.run_dir.rollouts, self._pending)
        self._open = AppendFile(self.run_dir.rollouts / OPEN_FILE)


def rewrite_open(rollouts: Path, frames: list[Frame]) -> None:
    """Make `open.msgpack` hold exactly these frames."""
    path = rollouts / OPEN_FILE
    if frames:
        atomic_write(path, b"".join(map(encode_frame, frames)))
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
    except OSError as error:
        raise store_error("empty", path, error) from error


def _recover(rollouts: Path) -> tuple[list[Frame], int]:
    """Unsealed frames of a former process, and the last sealed step. A crash between sealing a step and emptying the
    open file leaves frames that are already sealed; they are left out."""
    sealed = max(sealed_steps(rollouts), default=0)
    path = rollouts / OPEN_FILE
    if not path.exists():
        return [], sealed
    data = path.read_bytes()
    frames = [frame for frame, _ in read_frames(data)]
    pending = [frame for frame in frames if frame.file > sealed]
    if sum(len(encode_frame(frame)) for frame in pending) != len(data):
        rewrite_open(rollouts, pending)
    return pending, sealed
