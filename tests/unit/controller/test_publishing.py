"""T4: versions that come faster than they can be installed, into engines that are slow, refuse, hang, die and come.

The production loop over the production fleet, on virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import hypothesis
from hypothesis import strategies as st

from prl.errors import RunFailed, WeightsError, WireError
from prl.loop.supervisor import Loop
from prl.messages import Installed, WeightsRef
from prl.testing.clock import run
from prl.testing.fake_engine import FakeEngine
from prl.testing.fakes import FakeRunner, FakeSink, FakeTrainer, fake_config, fake_state

from .helpers import World

STEPS = 8
BACK_S = 5.0
PROPERTY = hypothesis.settings(max_examples=120, deadline=None, derandomize=True)

Behaviour = tuple[str, float]
"""What one install does, and after how many seconds."""
behaviours = st.tuples(st.sampled_from(["take", "take", "take", "refuse", "fail", "hang", "die"]), st.floats(0.0, 25.0))


class Busy(FakeEngine):
    """Does one behaviour after the other, over all its lives; `published` is what may be read."""

    def __init__(self, world: Any, replica: int, script: list[Behaviour], published: set[int]) -> None:
        super().__init__()
        self.world, self.replica, self.script, self.published = world, replica, script, published

    async def install(self, weights: WeightsRef) -> Installed:
        what, seconds = self.script.pop(0) if self.script else ("take", 0.5)
        await asyncio.sleep(seconds)
        assert weights.version in self.published, f"version {weights.version} was released while it was read"
        if what == "refuse":
            raise WeightsError("checksum")
        if what == "die":
            self.world.leave(self.replica)
            self.world.come_back(self.replica)
        if what == "hang":
            await asyncio.Event().wait()
        if what in ("fail", "die"):
            raise WireError("the engine is gone")
        return await super().install(weights)


class Restarting(World):
    """A launcher that starts again whatever ended, after some seconds."""

    def __init__(self, scripts: Sequence[list[Behaviour]], published: set[int]) -> None:
        super().__init__()
        self.scripts = [list(script) for script in scripts]
        self.published = published
        for replica in range(len(scripts)):
            self._start(replica)

    def come_back(self, replica: int) -> None:
        asyncio.get_running_loop().call_later(BACK_S, self._start, replica)

    def _start(self, replica: int) -> None:
        self.join(replica, Busy(self, replica, self.scripts[replica], self.published))

    def _end(self, connection: Any, why: str) -> None:
        super()._end(connection, why)
        self.come_back(connection.replica)


class Publishing(FakeTrainer):
    """Keeps in `published` what it has published and not been told to release."""

    def __init__(self, seconds: Any) -> None:
        super().__init__(seconds)
        self.published: set[int] = set()

    async def publish(self, version: int) -> WeightsRef:
        self.published.add(version)
        return await super().publish(version)

    async def release(self, versions: Sequence[int]) -> None:
        await super().release(versions)
        self.published -= set(versions)


async def save(step: int, data: bytes) -> None:
    """Nobody reads these checkpoints."""


@PROPERTY
@hypothesis.given(
    scripts=st.lists(st.lists(behaviours, max_size=8), min_size=1, max_size=3),
    staleness=st.integers(0, 6),
    step_s=st.floats(0.1, 20),
    joins_at=st.none() | st.floats(0, 60),
    seed=st.integers(0, 10),
)
def test_every_version_is_acknowledged_or_skipped_and_the_trainer_goes_on(
    scripts: list[list[Behaviour]], staleness: int, step_s: float, joins_at: float | None, seed: int
) -> None:
    sink = FakeSink()
    trainer = Publishing(lambda: step_s)

    async def main() -> str:
        world = Restarting(scripts, trainer.published)
        if joins_at is not None:
            late = Busy(world, len(scripts), [("take", 20.0)], trainer.published)
            world.scripts.append(late.script)
            asyncio.get_running_loop().call_later(joins_at, world.join, len(scripts), late)
        chance = random.Random(seed)
        config = fake_config(steps=STEPS, max_staleness=staleness)
        runner = FakeRunner(world.fleet, seconds=lambda request: chance.uniform(0.1, 3.0))  # type: ignore[arg-type]
        state = fake_state(config, runner=runner, trainer=trainer, fleet=world.fleet)  # type: ignore[arg-type]
        state.sink, world.changed = sink, state.signal.notify
        try:
            await Loop(state, save).run()
        except RunFailed as error:
            return str(error)
        await asyncio.sleep(200)
        held = {engine.holds.version for engine in world.fleet.serving() if engine.holds is not None}
        assert held == {STEPS}, f"in the end the engines hold {held}"
        assert world.gateway.told[-1] == [(engine.replica, STEPS) for engine in world.fleet.serving()]
        return ""

    failed = run(main(), limit_s=10_000)
    if failed:
        # The one thing that may end it: every engine there is has refused the same version twice.
        assert "was refused" in failed, failed
        return
    assert trainer.version == STEPS
    acknowledged = [int(str(data["version"])) for kind, data in sink.events if kind == "weights_installed"]
    skipped = [version for kind, data in sink.events if kind == "weights_skipped" for version in data["versions"]]  # type: ignore[attr-defined]
    assert sorted([*acknowledged, *skipped]) == list(range(STEPS + 1))
    assert acknowledged == sorted(acknowledged)
    assert STEPS in acknowledged, "the last one always arrives"
    assert STEPS in trainer.published, "and stays until a newer one does"


def test_a_slow_engine_skips_versions_and_says_so() -> None:
    sink = FakeSink()

    async def main() -> None:
        trainer = Publishing(lambda: 0.1)
        world = Restarting([[("take", 20.0)] * 3], trainer.published)
        config = fake_config(steps=STEPS, max_staleness=6)
        runner = FakeRunner(world.fleet)  # type: ignore[arg-type]
        state = fake_state(config, runner=runner, trainer=trainer, fleet=world.fleet)  # type: ignore[arg-type]
        state.sink, world.changed = sink, state.signal.notify
        await Loop(state, save).run()

    run(main())
    skipped = [data for kind, data in sink.events if kind == "weights_skipped"]
    assert skipped and skipped[0]["versions"] == [2, 3, 4, 5, 6] and skipped[0]["newest"] == 7, skipped
