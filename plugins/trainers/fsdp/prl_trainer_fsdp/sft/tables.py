"""Sources that are tables of columns: Parquet files, and whatever the library `datasets` reads.

Columns and their types are checked when one is opened. A text column may be a large or a dictionary-encoded one; a
column of messages is a list of structures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from prl.config.data import SftSourceTable
from prl.errors import ConfigError, EnvironmentNotFit
from prl_trainer_fsdp.sft.records import OTHER_NAMES, BadRow, Row

BATCH = 1024
"""Rows that become Python objects at a time."""


class Parquet:
    """A Parquet file, its needed columns held in memory as they are in Arrow.

    Raises:
        ConfigError: it cannot be read, or its columns are not what they should be.
    """

    def __init__(self, path: Path, table: SftSourceTable) -> None:
        try:
            schema = pq.read_schema(path)
            needed = check_columns(schema, table)
            self._table = pq.read_table(path, columns=needed, memory_map=True)
        except OSError as error:
            raise ConfigError([f"data: {path} cannot be read: {error.strerror or error}"]) from error
        except pa.ArrowException as error:
            raise ConfigError([f"data: {path} is no Parquet file: {error}"]) from error

    def rows(self) -> Iterator[Row]:
        for start in range(0, len(self._table), BATCH):
            for offset, row in enumerate(self._table.slice(start, BATCH).to_pylist()):
                yield Row(start + offset + 1, start + offset, without_nulls(row))

    def read(self, at: int) -> Any:
        return without_nulls(self._table.slice(at, 1).to_pylist()[0])


class Datasets:
    """A folder that `datasets` saved, a folder of data files, or a name on a hub. Rows stay on disk.

    Raises:
        ConfigError: it cannot be read, has no such split, or its columns are not what they should be.
        EnvironmentNotFit: the library is not installed.
    """

    def __init__(self, table: SftSourceTable) -> None:
        self._dataset = _load(table)
        needed = check_columns(self._dataset.features.arrow_schema, table)
        self._dataset = self._dataset.select_columns(needed)

    def index(self) -> NDArray[np.int64]:
        """Number, place and no size of every row, i64[n, 3]: none of them is looked at before it is trained."""
        numbers = np.arange(len(self._dataset), dtype=np.int64)
        return np.stack([numbers + 1, numbers, np.zeros_like(numbers)], axis=1)

    def read(self, at: int) -> Any:
        try:
            return without_nulls(self._dataset[at])
        except (pa.ArrowException, OSError) as error:
            raise BadRow(f"it cannot be read: {error}") from error


def _load(table: SftSourceTable) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentNotFit(
            f"data: {table.path} is read by the library datasets, which cannot be imported ({error}): "
            'pip install "prl-trainer-fsdp[datasets]"'
        ) from error
    folder = Path(table.path).expanduser()
    saved = any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))
    try:
        if not saved:
            return datasets.load_dataset(str(table.path), table.config or None, split=table.split)
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetGenerationError) as error:
        raise ConfigError([f"data: {table.path} cannot be loaded by datasets: {error}"]) from error
    if isinstance(found, datasets.DatasetDict):
        if table.split not in found:
            raise ConfigError([f"data: {table.path} has no split {table.split!r}: it has {', '.join(found)}"])
        return found[table.split]
    return found


def check_columns(schema: pa.Schema, table: SftSourceTable) -> list[str]:
    """The columns that are needed. Raises: ConfigError: one is missing or of another type."""
    present = set(schema.names)
    if table.messages in present:
        wanted: dict[str, tuple[str, ...]] = {table.messages: _LISTS}
    elif {table.prompt, table.completion} <= present:
        wanted = {table.prompt: _BOTH, table.completion: _BOTH}
    else:
        raise ConfigError(
            [
                f"data: {table.path} has the columns {', '.join(schema.names) or 'nothing'}; expected "
                f"{table.messages!r}, or {table.prompt!r} and {table.completion!r}. {OTHER_NAMES}"
            ]
        )
    if table.tools in present:
        wanted[table.tools] = _BOTH
    problems = [
        f"data: {table.path}: column {name!r} is {schema.field(name).type}; expected {_EXPECTED[kinds]}"
        for name, kinds in wanted.items()
        if _kind(schema.field(name).type) not in kinds
    ]
    if problems:
        raise ConfigError(problems)
    return list(wanted)


_LISTS = ("list",)
_BOTH = ("text", "list")
_EXPECTED: dict[tuple[str, ...], str] = {_LISTS: "a list of {role, content}", _BOTH: "text or a list"}


def _kind(found: pa.DataType) -> str:
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_string(found) or pa.types.is_large_string(found) or pa.types.is_string_view(found):
        return "text"
    if pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_list_view(found):
        return "list" if pa.types.is_struct(found.value_type) else f"list of {found.value_type}"
    return str(found)


def without_nulls(value: Any) -> Any:
    """Arrow gives every structure of a column the same fields, and null to those that a row does not have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
