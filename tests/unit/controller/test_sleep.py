"""`engine.sleep`: while the trainer trains no engine has anything on the GPU, nor has one that joins. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from prl.config.checks import check
from prl.config.schema import RunConfig
from prl.errors import WireError
from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest, Installed, TrainBatch, TrainReport, WeightsRef
from prl.testing.clock import run
from prl.testing.fake_engine import FakeEngine
from prl.testing.fakes import FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Outcome

from .helpers import Scripted, World, ref


class Trainer(FakeTrainer):
    def __init__(self, world: World) -> None:
        super().__init__(lambda: 3.0)
        self.world = world
        self.during: list[list[bool]] = []

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        report = await super().train(batches)
        self.during.append([engine.asleep for engine in self.world.behind.values()])
        return report


class Runner(FakeRunner):
    """Episodes must find every serving engine awake."""

    def __init__(self, world: World) -> None:
        super().__init__(world.fleet, seconds=lambda request: 2.0)  # type: ignore[arg-type]
        self.world = world

    async def run(self, request: EpisodeRequest) -> Outcome:
        outcome = await super().run(request)
        assert not any(engine.client.asleep for engine in self.world.fleet.serving())  # type: ignore[attr-defined]
        return outcome


def sleeping(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"sleep": True})})


def test_engines_sleep_while_the_trainer_trains_and_are_awake_to_install_and_to_sample() -> None:
    async def main() -> None:
        world = World(FakeEngine(), FakeEngine())
        trainer, runner = Trainer(world), Runner(world)
        state = fake_state(sleeping(fake_config(steps=3, max_staleness=0)), runner=runner, trainer=trainer)
        state.roles.fleet = world.fleet
        world.changed = state.signal.notify
        await Loop(state, _save).run()
        assert trainer.during == [[True, True]] * 3
        assert [engine.installed for engine in world.behind.values()] == [[0, 1, 2, 3]] * 2
        assert not any(engine.asleep for engine in world.behind.values()), "the last version can be evaluated"

    run(main())


def test_an_engine_that_joins_meanwhile_sleeps_at_once_and_catches_up_with_the_others() -> None:
    async def main() -> None:
        world = World(Scripted())
        await world.fleet.install(ref(1))
        await world.fleet.sleep()
        late = Scripted()
        world.join(1, late)
        await asyncio.sleep(5)
        assert late.asleep and late.installed == [], "it would take the memory that the trainer uses"
        await world.fleet.install(ref(2))
        assert not late.asleep and late.installed == [2] and world.gateway.told[-1] == [(0, 2), (1, 2)]

    run(main())


def test_an_engine_that_is_still_falling_asleep_is_woken_before_it_installs() -> None:
    class Slow(Scripted):
        """As a server has it: one after the other, in the order in which they are asked for."""

        def __init__(self) -> None:
            super().__init__()
            self.lock = asyncio.Lock()

        async def sleep(self) -> None:
            async with self.lock:
                await asyncio.sleep(5)
                await super().sleep()

        async def wake(self) -> None:
            async with self.lock:
                await super().wake()

        async def install(self, weights: WeightsRef) -> Installed:
            async with self.lock:
                assert not self.asleep, "there is no memory to install into"
                return await super().install(weights)

    async def main() -> None:
        world = World(Scripted())
        await world.fleet.install(ref(1))
        await world.fleet.sleep()
        late = Slow()
        world.join(1, late)
        await asyncio.sleep(1)
        await world.fleet.install(ref(2))
        assert not late.asleep and late.installed == [2] and not world.ended

    run(main())


def test_an_engine_that_cannot_free_its_memory_is_ended_and_one_that_cannot_wake_is_started_again() -> None:
    class Broken(Scripted):
        async def sleep(self) -> None:
            raise WireError("the driver refuses")

    class Comatose(Scripted):
        async def wake(self) -> None:
            raise WireError("no memory")

    async def main() -> None:
        world = World(Broken(), Comatose())
        await world.fleet.install(ref(1))
        await world.fleet.sleep()
        assert world.ended == [(0, "engine-0 cannot free its GPU's memory: the driver refuses")]
        world.restarts[1] = again = Scripted()
        await world.fleet.install(ref(2))
        assert [replica for replica, _ in world.ended] == [0, 1] and "no memory" in world.ended[1][1]
        assert again.installed == [2] and world.gateway.told[-1] == [(1, 2)]

    run(main())


@pytest.mark.parametrize(
    ("staleness", "engine", "message"),
    [
        (0, "vllm", ""),
        (4, "vllm", "max_staleness = 4 answers are sampled while the trainer trains"),
        (0, "embedded", "embedded cannot free its memory"),
    ],
)
def test_sleep_needs_a_synchronous_run_and_an_engine_that_can(staleness: int, engine: str, message: str) -> None:
    base: dict[str, Any] = fake_config(max_staleness=staleness).model_dump()
    config = RunConfig.model_validate(
        base
        | {"engine": {"use": engine, "sleep": True}, "envs": [{"use": "reverse_text"}], "model": {"path": "hub/name"}}
    )
    found = [problem.message for problem in check(config) if problem.key == "engine.sleep"]
    assert [message in text for text in found] == [True] * bool(message)


async def _save(step: int, data: bytes) -> None: ...
