"""What most environments would write again: a single-turn base class, virtual task lists, a split by hash.

An environment needs none of this; any object with `tasks` and `run` is one (`prl.protocols.Env`).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from prl.protocols import Agent, Context
from prl.types import Episode, Split, Task

Score = float | Mapping[str, float]
"""A reward, or a mapping whose key "reward" is the reward and whose other keys are metrics."""


class SingleTurnEnv:
    """One prompt, one answer, one score. A subclass provides `tasks` and `score`::

    class Shout(SingleTurnEnv):
        def tasks(self, split):
            return [Task(id=w, prompt=f"Shout: {w}", data={"answer": w.upper()}) for w in words[split]]

        def score(self, task, text):
            return float(text == task.data["answer"])
    """

    def tasks(self, split: Split) -> Sequence[Task] | Iterable[Task]:
        raise NotImplementedError(f"{type(self).__name__} must define tasks(split)")

    def score(self, task: Task, text: str) -> Score | Awaitable[Score]:
        """Judge an answer. May be `async def` when it waits for something; CPU-bound work belongs in a thread."""
        raise NotImplementedError(f"{type(self).__name__} must define score(task, text)")

    async def run(self, task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        turn = await agent.reply(task.prompt)
        return scored(agent, await resolve(self.score(task, turn.text)))


async def resolve(score: Score | Awaitable[Score]) -> Score:
    """The result of a score function, whether it was `def` or `async def`."""
    return await score if inspect.isawaitable(score) else score


def scored(agent: Agent, score: Score) -> Episode:
    """An episode of one agent from what a score function returned.

    Raises:
        ValueError: a mapping without the key "reward".
    """
    if not isinstance(score, Mapping):
        return Episode([agent.finish(score)])
    metrics = {name: float(value) for name, value in score.items() if name != "reward"}
    if "reward" not in score:
        raise ValueError(f"a score needs the key 'reward'; this one has {sorted(score)}")
    return Episode([agent.finish(float(score["reward"]))], metrics=metrics)


class TaskList(Sequence[Task]):
    """`count` tasks that are made when they are asked for: `make(index)` must give the same task every time."""

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"task {index} of {self._count}")
        return self._make(index % self._count)


def share(text: str, salt: str = "") -> float:
    """A number in [0, 1) that depends on the text alone: `share(text) < 0.1` holds out a tenth, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(f"{salt}\0{text}".encode(), digest_size=8).digest(), "big") / 2**64


def stable_seed(*parts: Any) -> int:
    """A 64-bit number from any printable parts, the same in every process (Python's own `hash` is not)."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
