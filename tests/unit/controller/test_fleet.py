"""T4, T11, T12, T13: engines that fail, hang, vanish, come, leave or are asked twice while weights are installed. On
virtual time."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from prl.controller import fleet as fleet_module
from prl.errors import RunFailed, WeightsError
from prl.loop.supervisor import Loop
from prl.messages import Installed, WeightsRef
from prl.testing.clock import run
from prl.testing.fake_engine import FakeEngine
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state

from .helpers import LIMIT_S, Scripted, World, drops, hangs, ref, refuses


def test_a_refusal_is_tried_once_more_and_a_second_one_is_an_error() -> None:
    async def main() -> None:
        once = World(Scripted(refuses))
        await once.fleet.install(ref(1))
        assert once.fleet.version == 1 and once.gateway.told[-1] == [(0, 1)]
        engine = Scripted(refuses, refuses)
        twice = World(engine)
        with pytest.raises(WeightsError, match="checksum"):
            await twice.fleet.install(ref(1))
        assert engine.version == 0 and not any(twice.gateway.told), "nobody serves what was refused"
        await twice.fleet.install(ref(1))
        assert twice.gateway.told[-1] == [(0, 1)], "the engine is whole, and a later install works"

    run(main())


def test_the_worst_engine_answers_for_all_that_serve_the_version() -> None:
    async def main() -> None:
        world = World(FakeEngine(), FakeEngine(), Scripted(refuses, refuses))
        for engine, found in zip(world.behind.values(), (0.001, 0.004, 0.1), strict=True):
            engine.probed = Installed(100, found, 2 * found)
        assert await world.fleet.install(ref(1)) == Installed(100, 0.004, 0.008), "the third serves nothing"

    run(main())


def test_what_one_engine_refuses_and_another_took_is_that_engines_fault() -> None:
    async def main() -> None:
        world = World(Scripted(refuses, refuses), FakeEngine())
        world.restarts[0] = Scripted()
        await world.fleet.install(ref(1))
        ((replica, why),) = world.ended
        assert replica == 0 and "engine-0 cannot install version 1" in why and "checksum" in why
        assert world.gateway.told[-1] == [(1, 1)]
        await asyncio.sleep(10)
        assert world.gateway.told[-1] == [(0, 1), (1, 1)]

    run(main())


def test_an_engine_that_fails_and_lives_is_asked_again_and_started_again_the_second_time() -> None:
    """T12: its answer is an error that is not about the weights, as a server's 500 is."""

    async def main() -> None:
        world = World(Scripted(drops))
        await world.fleet.install(ref(1))
        assert world.gateway.told[-1] == [(0, 1)] and not world.ended
        world = World(Scripted(drops, drops))
        world.restarts[0] = Scripted()
        await world.fleet.install(ref(1))
        assert [replica for replica, _ in world.ended] == [0]
        assert "engine-0 cannot install version 1: engine-0 closed" in world.ended[0][1]
        assert asyncio.get_running_loop().time() < 20 and world.gateway.told[-1] == [(0, 1)]

    run(main())


def test_an_engine_that_hangs_in_an_install_holds_nobody_up_for_longer_than_its_deadline() -> None:
    """T12: the others serve the version, it is started again, and installs what is the newest by then."""

    async def main() -> None:
        world = World(Scripted(hangs), Scripted())
        world.restarts[0] = again = Scripted()
        await world.fleet.install(ref(1))
        assert asyncio.get_running_loop().time() == pytest.approx(LIMIT_S, abs=1)
        ((replica, why),) = world.ended
        assert replica == 0 and "longer than engine.install_timeout_s = 30 s" in why
        assert world.gateway.told[-1] == [(1, 1)] and world.fleet.version == 1
        await world.fleet.install(ref(2))
        await asyncio.sleep(10)
        assert again.installed == [2] and world.gateway.told[-1] == [(0, 2), (1, 2)]

    run(main())


def test_nobody_waits_for_an_engine_that_joins_and_what_it_reads_is_not_released() -> None:
    """T11: it is many versions late, and hangs in the end."""

    async def main() -> None:
        world = World(Scripted())
        await world.fleet.install(ref(1))
        late = Scripted(lambda: asyncio.sleep(20.0), hangs)
        world.join(1, late)
        await asyncio.sleep(0.5)
        for version in (2, 3, 4):
            started = asyncio.get_running_loop().time()
            await world.fleet.install(ref(version))
            assert asyncio.get_running_loop().time() - started == pytest.approx(1.0)
            assert world.fleet.reading() == {1} and world.gateway.told[-1] == [(0, version)]
        await asyncio.sleep(25)
        assert late.installed == [1] and world.fleet.reading() == {4}, "it goes on with the newest"
        assert world.gateway.told[-1] == [(0, 4)], "it never served what others have left behind"
        await asyncio.sleep(LIMIT_S)
        assert [replica for replica, _ in world.ended] == [1] and not world.fleet.reading()

    run(main())


def test_an_engine_that_joins_catches_up_however_often_there_is_a_newer_version() -> None:
    async def main() -> None:
        world = World(Scripted())
        await world.fleet.install(ref(1))
        late = Scripted(*[lambda: asyncio.sleep(1.0)] * 20)  # twice as slow as the other
        world.join(1, late)
        for version in range(2, 8):
            await world.fleet.install(ref(version))
        assert world.gateway.told[-1] == [(0, 7), (1, 7)] and len(late.installed) < 7
        versions = [found for told in world.gateway.told for replica, found in told if replica == 1]
        assert versions == sorted(versions)

    run(main())


def test_an_engine_that_leaves_serves_no_more_and_is_brought_nothing_unless_it_is_wanted_again() -> None:
    async def main() -> None:
        leaving = Scripted()
        world = World(Scripted(), leaving)
        await world.fleet.install(ref(1))
        await world.fleet.retire(1)
        assert world.gateway.told[-1] == [(0, 1)]
        await world.fleet.install(ref(2))
        assert leaving.installed == [1] and world.gateway.told[-1] == [(0, 2)]
        assert world.fleet.describe() == ["engine-1 is leaving: it finishes what it has (for 0.0 s)"]
        world.fleet.keep(2)
        assert world.gateway.told[-1] == [(0, 2)], "not with the version it had"
        await asyncio.sleep(2)
        assert leaving.installed == [1, 2] and world.gateway.told[-1] == [(0, 2), (1, 2)]

    run(main())


def test_an_engine_that_vanishes_during_an_install_leaves_the_others_serving() -> None:
    async def main() -> None:
        world = World(Scripted(drops), FakeEngine())
        asyncio.get_running_loop().call_later(1.5, world.leave, 0)
        await world.fleet.install(ref(1))
        assert world.gateway.told[-1] == [(1, 1)]
        replacement = Scripted()
        world.join(0, replacement)
        assert world.gateway.told[-1] == [(1, 1)], "a new engine does not serve before it holds the version"
        await asyncio.sleep(2)
        assert replacement.installed == [1] and world.gateway.told[-1] == [(0, 1), (1, 1)]

    run(main())


def test_the_only_engine_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        world = World(Scripted(drops))
        installing = asyncio.create_task(world.fleet.install(ref(1)))
        await asyncio.sleep(1.5)
        assert not installing.done()
        world.leave(0)
        await asyncio.sleep(20)
        world.join(0, Scripted())
        await installing
        assert world.fleet.version == 1 and world.gateway.told[-1] == [(0, 1)]

    run(main())


def test_a_run_without_engines_ends_with_a_reason() -> None:
    async def main() -> None:
        world = World(Scripted(drops))
        asyncio.get_running_loop().call_later(1.5, world.leave, 0)
        with pytest.raises(RunFailed, match="no engine serves version 1, and none came back"):
            await world.fleet.install(ref(1))
        assert asyncio.get_running_loop().time() == pytest.approx(fleet_module.RESTART_WAIT_S, abs=5)

    run(main())


def test_installs_that_overlap_happen_one_after_another() -> None:
    """T13: a second update begins while the first is under way; the engine ends with the later one, whole."""

    async def main() -> None:
        engine = Scripted()
        world = World(engine)
        await asyncio.gather(world.fleet.install(ref(1)), world.fleet.install(ref(2)), world.fleet.install(ref(3)))
        assert engine.installed[-1] == 3 and world.fleet.version == 3
        assert world.gateway.told[-1] == [(0, 3)]
        calls = engine.calls
        await world.fleet.install(ref(3))
        assert engine.version == 3 and engine.calls == calls, "what it holds already is not read again"

    run(main())


def test_an_engine_that_joins_during_an_install_gets_the_newest_version() -> None:
    async def main() -> None:
        world = World(Scripted())
        await world.fleet.install(ref(1))
        late = Scripted()
        installing = asyncio.create_task(world.fleet.install(ref(2)))
        await asyncio.sleep(0.5)
        world.join(1, late)
        await installing
        assert world.gateway.told[-1] == [(0, 2)]
        await asyncio.sleep(2)
        assert late.installed == [2] and world.gateway.told[-1] == [(0, 2), (1, 2)]

    run(main())


def test_an_engine_that_leaves_is_no_longer_announced() -> None:
    async def main() -> None:
        world = World(FakeEngine(), FakeEngine())
        await world.fleet.install(ref(1))
        world.leave(1)
        assert world.gateway.told[-1] == [(0, 1)]

    run(main())


async def save(step: int, data: bytes) -> None:
    """Nobody reads these checkpoints."""


class HangingFleet(FakeFleet):
    async def install(self, weights: WeightsRef) -> Installed:
        if weights.version == 2:
            await asyncio.Event().wait()
        return await super().install(weights)


def test_an_install_that_hangs_ends_the_run_within_its_deadline_and_releases_nothing() -> None:
    """T12: and T11: what an engine may still be reading is not deleted."""

    async def main() -> None:
        fleet, trainer = HangingFleet(), FakeTrainer()
        config = fake_config(steps=5, step_timeout_s=50.0)
        state = fake_state(config, runner=FakeRunner(fleet), trainer=trainer, fleet=fleet)
        with pytest.raises(RunFailed, match="installing version 2 took longer than loop.step_timeout_s = 50 s"):
            await Loop(state, save).run()
        assert asyncio.get_running_loop().time() == pytest.approx(50, abs=1)
        assert set(trainer.released) <= {0}, f"released {trainer.released} while version 2 was not installed"

    run(main())


def test_a_version_is_released_only_after_a_newer_one_is_installed() -> None:
    """T11: however slow the engines are."""
    order: list[tuple[str, int]] = []

    class Slow(FakeFleet):
        async def install(self, weights: WeightsRef) -> Installed:
            await asyncio.sleep(70)
            found = await super().install(weights)
            order.append(("installed", weights.version))
            return found

    class Releasing(FakeTrainer):
        async def release(self, versions: Any) -> None:
            order.extend(("released", version) for version in versions)

    async def main() -> None:
        fleet = Slow()
        state = fake_state(fake_config(steps=6), runner=FakeRunner(fleet), trainer=Releasing(), fleet=fleet)
        await Loop(state, save).run()

    run(main())
    newest = -1
    for what, version in order:
        if what == "installed":
            newest = version
        else:
            assert version < newest, f"version {version} was released while the engines were at {newest}"
    assert ("installed", 6) in order and any(what == "released" for what, _ in order)


def test_the_loads_of_serving_engines_are_what_their_heartbeats_say() -> None:
    """One that has not installed the current version yet, or says nothing, is no full engine."""

    async def main() -> None:
        world = World(FakeEngine(), FakeEngine())
        assert world.fleet.gauges() == [], "nobody serves"
        await world.fleet.install(ref(1))
        world.connections["engine", 0].gauges = {"kv_usage": 0.5, "capacity": 1000.0, "tokens": 7.0}
        first, second = world.fleet.gauges()
        assert (first.replica, first.kv_usage, first.capacity, first.waiting) == (0, 0.5, 1000.0, 0.0)
        assert (second.replica, second.capacity) == (1, 0.0) and 0 <= first.age_s < 60
        world.connections["engine", 1].gauges = {"kv_usage": math.nan, "capacity": math.inf, "waiting": -1.0}
        second = world.fleet.gauges()[1]
        assert (second.kv_usage, second.capacity, second.waiting) == (0.0, 0.0, 0.0)
        world.leave(0)
        assert [engine.replica for engine in world.fleet.gauges()] == [1]

    run(main())
