"""An environment's tasks by index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from prl.errors import RunFailed
from prl.protocols import Env
from prl.types import Split, Task

_encoder = msgspec.json.Encoder()
_pack = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Task).decode


class TaskPages:
    """Pages of `Env.tasks(split)`. A sequence is indexed; an iterator is read as far as needed, once, and kept."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._sources: dict[Split, Sequence[Task] | _Materialised] = {}

    def page(self, split: Split, start: int, count: int) -> list[Task]:
        """Tasks `[start, start + count)`; fewer at the end of the split.

        Raises:
            RunFailed: the environment could not make them, or one of them is no `Task` or not JSON-able.
        """
        if start < 0 or count < 0:
            raise RunFailed(f"tasks [{start}, {start} + {count}) of {split!r}: both numbers must be at least 0")
        try:
            source = self._source(split)
            page = list(source[start : start + count])
        except Exception as error:
            raise RunFailed(f"{type(self._env).__name__}.tasks({split!r}): {type(error).__name__}: {error}") from error
        for offset, task in enumerate(page):
            _check(task, f"{type(self._env).__name__}.tasks({split!r})[{start + offset}]")
        return page

    def _source(self, split: Split) -> Sequence[Task] | _Materialised:
        source = self._sources.get(split)
        if source is None:
            tasks = self._env.tasks(split)
            source = tasks if isinstance(tasks, Sequence) else _Materialised(iter(tasks))
            self._sources[split] = source
        return source


class _Materialised:
    """The part of an iterator that was read so far."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._rest = tasks
        self._read: list[Task] = []

    def __getitem__(self, index: slice) -> list[Task]:
        missing = index.stop - len(self._read)
        if missing > 0:
            self._read.extend(islice(self._rest, missing))
        return self._read[index]


def _check(task: object, where: str) -> None:
    if not isinstance(task, Task):
        raise RunFailed(f"{where} is a {type(task).__name__}, not a prl.Task")
    try:
        _encoder.encode(task)
        _decode(_pack(task))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RunFailed(f"{where} (id {task.id!r}) cannot be written as JSON and read back: {error}") from error
