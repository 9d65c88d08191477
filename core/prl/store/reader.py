"""Reading a run, while it is written or after it died: `open_run(path)`.

Whatever a crash or a copy left half written costs that piece only: a torn last line, a torn last frame, an unreadable
Parquet file. Each is named in `RunReader.problems`, and everything else is returned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prl.errors import StoreError
from prl.rundir import RunDir
from prl.store.files import complete_lines
from prl.store.records import INDEX_FILE, OPEN_FILE, Frame, read_frames, sealed_steps

if TYPE_CHECKING:
    import pyarrow as pa

_decode_json = msgspec.json.Decoder().decode


class RunReader:
    """One run directory. Every property reads its file anew, so that a running run can be followed.

    `problems` names what could not be read so far, one line each.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.problems: list[str] = []

    def __repr__(self) -> str:
        """One line for a notebook. Raises nothing: a damaged file is met where it is read."""
        try:
            status = self.status or {}
        except StoreError:
            status = {}
        return f"<run {self.run_dir.path}: {status.get('state', '?')}, step {status.get('step', '?')}>"

    @property
    def config(self) -> dict[str, Any] | None:
        return self._document(self.run_dir.config)

    @property
    def lock(self) -> dict[str, Any] | None:
        return self._document(self.run_dir.lock)

    @property
    def status(self) -> dict[str, Any] | None:
        return self._document(self.run_dir.status)

    @property
    def summary(self) -> dict[str, Any] | None:
        """None until the run has ended."""
        return self._document(self.run_dir.summary)

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._lines(self.run_dir.events)

    @property
    def metrics(self) -> pa.Table:
        """One row per line of `metrics.jsonl`: `step` i64, `time` f64, and a column for every name in any line."""
        import pyarrow as pa

        rows = self._lines(self.run_dir.metrics)
        names = dict.fromkeys(["step", "time", *(name for row in rows for name in row)])
        columns = [_column(name, [row.get(name) for row in rows]) for name in names]
        return pa.Table.from_arrays(columns, names=list(names))

    @property
    def index(self) -> pa.Table:
        """`rollouts/index.jsonl`: one small row per rollout, without messages and tokens."""
        import pyarrow as pa

        return pa.Table.from_pylist(self._lines(self.run_dir.rollouts / INDEX_FILE))

    def rollouts(self, step: int | None = None) -> pa.Table:
        """One row per rollout, sealed and not; with `step` only this step's file. Columns: docs/run_directory.md."""
        import pyarrow as pa

        from prl.store.columns import SCHEMA, read_parquet, table_of

        sealed = sealed_steps(self.run_dir.rollouts)
        tables = []
        for number, path in sealed.items():
            if step is None or step == number:
                try:
                    tables.append(read_parquet(path))
                except (OSError, pa.ArrowException) as error:
                    self._problem(f"{path} is not readable and was left out: {_first_line(error)}")
        frames = [frame for frame in self._unsealed(max(sealed, default=0)) if step is None or step == frame.file]
        if frames or not tables:
            tables.append(table_of(frames))
        return pa.concat_tables(tables, promote_options="default") if tables else SCHEMA.empty_table()

    def _unsealed(self, sealed: int) -> list[Frame]:
        path = self.run_dir.rollouts / OPEN_FILE
        if not path.exists():
            return []
        data = path.read_bytes()
        end = 0
        frames = []
        for frame, offset in read_frames(data):
            end = offset
            if frame.file > sealed:
                frames.append(frame)
        if end < len(data):
            self._problem(f"{path}: the last {len(data) - end} bytes are an incomplete record and were left out")
        return frames

    def _document(self, path: Path) -> dict[str, Any] | None:
        """Raises: StoreError: the file is there but is not JSON."""
        try:
            value = json.loads(path.read_bytes())  # a configuration may hold Infinity
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreError(f"{path} is damaged ({error}): restore it from a copy") from error
        return dict(value)

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        data = path.read_bytes()
        lines = complete_lines(data)
        torn = len(data) - data.rfind(b"\n") - 1
        if torn:
            self._problem(f"{path}: the last line was cut off after {torn} bytes and was left out")
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(_decode_json(line))
            except msgspec.DecodeError as error:
                self._problem(f"{path}:{number} is damaged and was left out: {error}")
        return rows

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def open_run(path: Path | str) -> RunReader:
    """Open a run directory for reading; nothing in it is changed, and the run may be running.

    Raises:
        StoreError: there is no run at `path`.
    """
    run_dir = RunDir(path)
    if not any(file.exists() for file in (run_dir.config, run_dir.metrics, run_dir.status)):
        raise StoreError(
            f"{run_dir.path} is not a run directory, such as runs/first: it has neither config.json nor metrics.jsonl"
        )
    return RunReader(run_dir)


def _column(name: str, values: list[Any]) -> pa.Array:
    """Numbers as f64 (`step` as i64), anything else as text."""
    import pyarrow as pa

    if name == "step":
        return pa.array(values, pa.int64())
    if all(value is None or isinstance(value, int | float) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
