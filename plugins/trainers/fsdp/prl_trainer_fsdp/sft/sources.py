"""Files and datasets: which rows there are, and reading some of them.

A JSONL file is checked line by line and a Parquet file row by row before anything else happens; what is kept of it is
where each good row stands. A dataset of the library `datasets` may have any size: its columns are checked first, its
rows when they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prl.config.data import SftSourceTable
from prl.errors import ConfigError
from prl_trainer_fsdp.sft import tables
from prl_trainer_fsdp.sft.records import BadRow, Record, Row, parse, text_size

log = logging.getLogger(__name__)

NAMED = 5
"""Bad rows that an error names; the others are counted."""
BOM = b"\xef\xbb\xbf"
LINE_FILES = (".jsonl", ".json", ".ndjson")


class Source:
    """The good rows of a source, by index.

    Args:
        index: i64[n, 3]: number, place and size of each good row; None has every row checked. The size is that of its
            text, or 0 where it is not known.
        skip: leave bad rows out and count them in `skipped`.

    Raises:
        ConfigError: the source cannot be read, has other columns, holds a bad row, or no row at all.
    """

    def __init__(self, table: SftSourceTable, index: NDArray[np.int64] | None = None, *, skip: bool = False) -> None:
        self.table = table
        self.skipped = 0
        self._reader = open_reader(table)
        self.index = index if index is not None else self._checked(skip)

    def __len__(self) -> int:
        return len(self.index)

    def place(self, index: int) -> str:
        """How an error names a row."""
        return f"{self.table.path}:{self.index[index, 0]}"

    def record(self, index: int) -> Record:
        """Raises: BadRow: only of a dataset whose rows were not looked at before."""
        return parse(self._reader.read(int(self.index[index, 1])), self.table)

    def longest(self, count: int) -> list[int]:
        """The rows with the most text; the first ones where that is not known."""
        return np.argsort(-self.index[:, 2], kind="stable")[:count].tolist()

    def _checked(self, skip: bool) -> NDArray[np.int64]:
        reader = self._reader
        index = reader.index() if isinstance(reader, tables.Datasets) else self._good_rows(reader, skip)
        if not len(index):
            what = f"{self.skipped} rows, all of them bad" if self.skipped else "no example"
            raise ConfigError([f"data: {self.table.path} holds {what}"])
        return index

    def _good_rows(self, reader: JsonLines | tables.Parquet, skip: bool) -> NDArray[np.int64]:
        good: list[tuple[int, int, int]] = []
        named: list[str] = []
        for row in reader.rows():
            try:
                if isinstance(row.value, BadRow):
                    raise row.value
                size = text_size(parse(row.value, self.table))
            except BadRow as error:
                self.skipped += 1
                if len(named) < NAMED:
                    named.append(f"{self.table.path}:{row.number}: {error}")
            else:
                good.append((row.number, row.at, size))
        if named and not skip:
            more = self.skipped - len(named)
            raise ConfigError([*named, *([f"{self.table.path}: and {more} more bad rows"] if more else [])])
        for problem in named:
            log.warning("left out: %s", problem)
        return np.array(good, np.int64).reshape(-1, 3)


def open_reader(table: SftSourceTable) -> JsonLines | tables.Parquet | tables.Datasets:
    """Raises: ConfigError: it cannot be read, is of no known format, or lacks columns."""
    path = Path(table.path).expanduser()
    form = table.format
    if form == "auto":
        form = "jsonl" if path.suffix in LINE_FILES else "parquet" if path.suffix == ".parquet" else "datasets"
        if form == "datasets" and path.is_file():
            raise ConfigError(
                [f"data: {table.path} is neither .jsonl nor .parquet: say which with format in its [[data]] table"]
            )
    if form == "jsonl":
        return JsonLines(path)
    if form == "parquet":
        return tables.Parquet(path, table)
    return tables.Datasets(table)


class JsonLines:
    """A JSONL file. Its lines stay there: every worker reads them through the system's page cache.

    Raises:
        ConfigError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._decode = msgspec.json.Decoder().decode
        try:
            self._file = path.open("rb")
            self._start = len(BOM) if self._file.read(len(BOM)) == BOM else 0
        except OSError as error:
            raise ConfigError([f"data: {path} cannot be read: {error.strerror}"]) from error

    def rows(self) -> Iterator[Row]:
        at = self._file.seek(self._start)
        for number, line in enumerate(self._file, 1):
            if line.strip():
                yield Row(number, at, self._decoded(line))
            at += len(line)

    def read(self, at: int) -> Any:
        """Raises: BadRow: the file has changed since it was checked."""
        self._file.seek(at)
        value = self._decoded(self._file.readline())
        if isinstance(value, BadRow):
            raise value
        return value

    def _decoded(self, line: bytes) -> Any:
        try:
            return self._decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            hint = " (an array over several lines? A JSONL file has one table a line)" if line[:1] == b"[" else ""
            return BadRow(f"it is no JSON: {error}{hint}")


def open_sources(
    configured: Sequence[SftSourceTable], *, skip: bool, indices: Sequence[NDArray[np.int64]] | None = None
) -> list[Source]:
    """Raises: ConfigError: every problem of every source."""
    sources, problems = [], []
    for number, table in enumerate(configured):
        try:
            sources.append(Source(table, None if indices is None else indices[number], skip=skip))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return sources
