"""Where training tasks come from: every environment's train split, mixed by weight, in an order the seed decides."""

from __future__ import annotations

import bisect
import random
from collections.abc import Mapping, Sequence

import msgspec

from prl.errors import RunFailed
from prl.protocols import EpisodeRunner
from prl.types import Task

PAGE = 256
"""Tasks fetched from an environment worker at a time."""


class TaskSourceState(msgspec.Struct):
    """What a checkpoint stores: positions, known split lengths, `random.Random` state, tasks to draw again."""

    position: dict[str, int]
    length: dict[str, int]
    random: tuple[int, list[int], float | None]
    redraw: list[tuple[int, str, Task, int]]


class TaskSource:
    """Draws (environment label, task). Its state is a position per environment and a random state: exact on resume."""

    def __init__(self, runner: EpisodeRunner, weights: Mapping[str, float], seed: int) -> None:
        self._runner = runner
        self._labels = sorted(weights)
        self._weights = [weights[label] for label in self._labels]
        self._random = random.Random(f"{seed}/tasks")
        self._position = dict.fromkeys(self._labels, 0)
        self._length: dict[str, int] = {}
        self._pages: dict[str, tuple[int, Sequence[Task]]] = {}
        self._redraw: list[tuple[int, str, Task, int]] = []
        self._held: list[tuple[int, str, Task, int]] = []

    def put_back(self, group: int, env: str, task: Task, redraws: int, *, hold: bool = False) -> None:
        """Draw this task again before any new one (with `hold` not before `release`), the oldest group's first, unless
        a resumed run no longer has its environment."""
        if env in self._position:
            entries = self._held if hold else self._redraw
            bisect.insort(entries, (group, env, task, redraws), key=_group)

    def release(self) -> None:
        """What was put back and held is drawn from now on."""
        if self._held:
            self._redraw = sorted([*self._redraw, *self._held], key=_group)
            self._held.clear()

    async def draw(self) -> tuple[str, Task, int]:
        """The next (environment, task, how often it was redrawn).

        Raises:
            RunFailed: an environment has no training task at all.
        """
        if self._redraw:
            return self._redraw.pop(0)[1:]
        env = self._labels[0]
        if len(self._labels) > 1:
            env = self._random.choices(self._labels, self._weights)[0]
        position = self._position[env]
        task = await self._at(env, position)
        self._position[env] = position + 1
        return env, task, 0

    async def _at(self, env: str, position: int) -> Task:
        if env in self._length:
            position %= self._length[env]
        start, page = self._pages.get(env, (0, ()))
        if not start <= position < start + len(page):
            start = position
            page = await self._runner.tasks(env, "train", start, PAGE)
            if not page:
                if start == 0:
                    raise RunFailed(f"environment {env!r} has no training task")
                self._length[env] = start
                return await self._at(env, position)
            if len(page) < PAGE:
                self._length[env] = start + len(page)
            self._pages[env] = (start, page)
        return page[position - start]

    def state(self) -> TaskSourceState:
        version, internal, gauss = self._random.getstate()
        redraw = sorted([*self._redraw, *self._held], key=_group)
        return TaskSourceState(dict(self._position), dict(self._length), (version, list(internal), gauss), redraw)

    def load_state(self, state: TaskSourceState) -> None:
        # Environments may have been added or removed since.
        self._position.update({env: at for env, at in state.position.items() if env in self._position})
        self._length.update(state.length)
        version, internal, gauss = state.random
        self._random.setstate((version, tuple(internal), gauss))
        self._redraw = [entry for entry in state.redraw if entry[1] in self._position]


def _group(entry: tuple[int, str, Task, int]) -> int:
    return entry[0]
