"""Asynchrony pays: with an engine and a trainer of equal step time the loop keeps both busy. On virtual time."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Outcome

STEPS, GROUPS, GROUP_SIZE, SLOTS, STEP_S = 20, 8, 4, 8, 1.0


class SlottedRunner(FakeRunner):
    """An engine of fixed throughput: a batch takes `STEP_S`, however many episodes are waiting."""

    def __init__(self, fleet: FakeFleet) -> None:
        super().__init__(fleet, seconds=lambda request: STEP_S * SLOTS / (GROUPS * GROUP_SIZE))
        self._slots = asyncio.Semaphore(SLOTS)

    async def run(self, request: EpisodeRequest) -> Outcome:
        async with self._slots:
            return await super().run(request)


@cache
def seconds(max_staleness: int) -> float:
    async def main() -> float:
        config = fake_config(steps=STEPS, groups_per_step=GROUPS, group_size=GROUP_SIZE, max_staleness=max_staleness)
        fleet = FakeFleet()
        state = fake_state(config, runner=SlottedRunner(fleet), trainer=FakeTrainer(lambda: STEP_S), fleet=fleet)
        await Loop(state, save).run()
        assert state.version == STEPS
        return asyncio.get_running_loop().time()

    async def save(step: int, data: bytes) -> None:
        pass

    return clock.run(main())


def test_the_synchronous_algorithm_takes_turns() -> None:
    assert seconds(0) == pytest.approx(2 * STEPS * STEP_S, rel=0.02)


@pytest.mark.parametrize(("max_staleness", "speed_up"), [(1, 1.7), (4, 1.8)])
def test_overlap(max_staleness: int, speed_up: float) -> None:
    assert seconds(0) / seconds(max_staleness) >= speed_up
