"""Tasks by index, whatever `Env.tasks` returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prl.env import TaskList
from prl.envworker.tasks import TaskPages
from prl.errors import RunFailed
from prl.types import Task


class Env:
    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks
        self.asked = 0

    def tasks(self, split: str) -> Any:
        self.asked += 1
        return self._tasks() if callable(self._tasks) else self._tasks

    async def run(self, task: Any, ctx: Any) -> Any: ...


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_a_sequence_is_indexed_and_only_where_asked() -> None:
    made: list[int] = []

    def make(index: int) -> Task:
        made.append(index)
        return Task(str(index))

    source = TaskPages(Env(TaskList(10**9, make)))
    assert ids(source.page("train", 5, 2)) == ["5", "6"]
    assert made == [5, 6]
    assert source.page("train", 10**9, 5) == []


def test_an_iterator_is_read_once_and_no_further_than_needed() -> None:
    read: list[int] = []

    def endless() -> Iterator[Task]:
        index = 0
        while True:
            read.append(index)
            yield Task(str(index))
            index += 1

    env = Env(endless)
    source = TaskPages(env)
    assert ids(source.page("train", 2, 2)) == ["2", "3"]
    assert read == [0, 1, 2, 3]
    assert ids(source.page("train", 0, 3)) == ["0", "1", "2"]
    assert read == [0, 1, 2, 3]
    assert env.asked == 1


def test_a_page_at_the_end_is_shorter() -> None:
    source = TaskPages(Env(lambda: iter([Task("a"), Task("b")])))
    assert ids(source.page("eval", 1, 5)) == ["b"]
    assert source.page("eval", 2, 5) == []


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"id": "x"}], r"Env.tasks\('train'\)\[0\] is a dict, not a prl.Task"),
        ([Task("x", data={"f": object()})], r"\(id 'x'\) cannot be written as JSON and read back"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (None, "TypeError"),
    ],
)
def test_what_is_no_task_is_refused_by_its_place(tasks: Any, message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        TaskPages(Env(tasks)).page("train", 0, 1)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(RunFailed, match="at least 0"):
        TaskPages(Env([])).page("train", -1, 1)
