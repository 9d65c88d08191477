"""A run may be resumed with another configuration: the guarantee and the numbering of episodes are those of the new."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from prl.errors import EpisodeFailed
from prl.loop import snapshot
from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest
from prl.testing.clock import run
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Outcome

from .helpers import decode


class CountingRunner(FakeRunner):
    """Remembers the episode ids it was asked for."""

    def __init__(self, fleet: FakeFleet, **more: Any) -> None:
        super().__init__(fleet, **more)
        self.ids: list[int] = []

    async def run(self, request: EpisodeRequest) -> Outcome:
        self.ids.append(request.episode_id)
        return await super().run(request)


async def train(
    data: bytes | None, until: int, **loop: Any
) -> tuple[dict[int, list[tuple[int, int]]], list[int], dict[int, bytes]]:
    """Train from a snapshot to step `until`: what was trained, the episode ids, and snapshots after every step."""
    fleet = FakeFleet(lambda: 0.5)
    runner = CountingRunner(fleet, seconds=lambda request: 1.0 + request.episode_id % 7)
    trainer = FakeTrainer(lambda: 2.0)
    state = fake_state(fake_config(**loop), runner=runner, trainer=trainer, fleet=fleet)
    if data is not None:
        trainer.version = snapshot.restore(state, data).step
        fleet.version = trainer.version
    saved: dict[int, bytes] = {}

    async def save(step: int, taken: bytes) -> None:
        saved[step] = taken

    task = asyncio.create_task(Loop(state, save).run())
    while state.version < until and not task.done():
        state.checkpoint_requested = True
        state.signal.notify()
        await asyncio.sleep(0.1)
    if task.done():
        await task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return trainer.trained, runner.ids, saved


@pytest.mark.parametrize("smaller", [0, 1, 2])
def test_a_smaller_staleness_bound_holds_from_the_resume_on(smaller: int) -> None:
    async def main() -> None:
        _, _, saved = await train(None, 6, steps=12, max_staleness=4)
        trained, _, _ = await train(saved[6], 12, steps=12, max_staleness=smaller)
        assert sorted(trained) == [7, 8, 9, 10, 11, 12]
        ages = [step - 1 - version for step, rows in trained.items() for version, _ in rows]
        assert max(ages) <= smaller

    run(main())


def test_episodes_of_another_group_size_get_numbers_of_their_own() -> None:
    async def main() -> None:
        _, before, saved = await train(None, 6, steps=12, max_staleness=4, group_size=8)
        _, after, _ = await train(saved[6], 12, steps=12, max_staleness=4, group_size=2)
        assert max(Counter(after).values()) == 1
        known = int(decode(saved[6]).counters["next_episode"])
        assert min(after) >= known > 6 * 4 * 8
        assert known <= max(before) + 1

    run(main())


def test_every_attempt_has_a_number_of_its_own() -> None:
    async def main() -> None:
        fleet = FakeFleet()
        lost = EpisodeFailed("worker_lost", retryable=True)
        runner = CountingRunner(fleet, fails=lambda request: lost if request.attempt == 0 else None)
        state = fake_state(fake_config(steps=3), runner=runner, fleet=fleet)
        await Loop(state, _save_nothing).run()
        assert max(Counter(runner.ids).values()) == 1
        assert state.next_episode == len(runner.ids)

    run(main())


async def _save_nothing(step: int, data: bytes) -> None:
    pass
