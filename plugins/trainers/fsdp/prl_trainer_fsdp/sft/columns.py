"""Columns and first rows of the files of a supervised run, looked at before it starts; no torch.

The run itself looks at every row. Data that the library `datasets` reads is left to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prl.config.data import SftDataTable, SftSourceTable
from prl.errors import ConfigError
from prl_trainer_fsdp.sft.records import BadRow, parse
from prl_trainer_fsdp.sft.sources import LINE_FILES, JsonLines, open_reader

ROWS = 8
"""How many first rows of a JSONL file are looked at: enough to see that its columns have other names."""


def data_problems(data: SftDataTable) -> Iterator[tuple[str, str]]:
    """Pairs of a key of `[data]` and what is wrong with it."""
    for key, sources in (("train", data.train), ("eval", data.eval)):
        for index, source in enumerate(sources):
            for message in _problems(source, skip=data.on_bad_row == "skip"):
                yield f"{key}.{index}", message


def _problems(table: SftSourceTable, *, skip: bool) -> list[str]:
    if not table.path.endswith((*LINE_FILES, ".parquet")) and table.format in ("auto", "datasets"):
        return []
    try:
        reader = open_reader(table)
    except ConfigError as error:
        return [problem.removeprefix("data: ") for problem in error.problems]
    bad = []
    for row in itertools.islice(reader.rows(), ROWS) if isinstance(reader, JsonLines) else ():
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            parse(row.value, table)
        except BadRow as error:
            bad.append(f"{table.path}:{row.number}: {error}")
        else:
            if skip:
                return []
    return bad[:1]
