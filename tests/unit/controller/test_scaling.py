"""More and fewer engines: what is asked of the launcher and when, and who is missed. On virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from prl.controller.scaling import Scaler
from prl.errors import WireError
from prl.launching import LauncherHello, RoleExited, Scaled, ScaleRole
from prl.messages import EngineHealth
from prl.testing.clock import run
from prl.testing.fake_engine import FakeEngine
from prl.testing.fakes import FakeSink

from .helpers import World, ref

DRAIN_S = 20.0


class Loaded(FakeEngine):
    """Has requests until the time `until`."""

    def __init__(self, until: float = 0.0) -> None:
        super().__init__()
        self.until = until

    async def health(self) -> EngineHealth:
        load = int(asyncio.get_running_loop().time() < self.until)
        return EngineHealth(self.version, 0, False, load, 0.0)


class Launcher:
    """Starts and stops at once what it is asked for, or refuses."""

    def __init__(self, world: World, refused: str = "") -> None:
        self.world, self.refused = world, refused
        self.asked: list[tuple[float, int]] = []

    async def call(self, method: object, request: ScaleRole, *, timeout: float) -> Scaled:
        assert request.role == "engine"
        self.asked.append((asyncio.get_running_loop().time(), request.replicas))
        if self.refused:
            return Scaled(self.refused)
        there = {replica for role, replica in self.world.connections if role == "engine"}
        for replica in sorted(there):
            if replica >= request.replicas:
                self.world.leave(replica)
        for replica in range(request.replicas):
            if replica not in there:
                self.world.join(replica, Loaded())
        return Scaled()


async def made(*engines: FakeEngine, refused: str = "", attached: bool = True) -> tuple[World, Scaler, Launcher]:
    world = World()
    scaler = Scaler(FakeSink(), max(1, len(engines)), DRAIN_S)
    hub: Any = world
    scaler.attach(hub)
    for replica, engine in enumerate(engines):
        world.join(replica, engine)
    await world.fleet.install(ref(1))
    scaler.begin(world.fleet)
    launcher = Launcher(world, refused)
    if attached:
        peer: Any = launcher
        scaler._hello(peer, LauncherHello(["engine"]))
    return world, scaler, launcher


def test_more_engines_serve_when_they_hold_the_version() -> None:
    async def main() -> None:
        world, scaler, launcher = await made(Loaded())
        reply = await scaler.scale(3)
        assert reply.ok and "engines: 1 -> 3" in reply.message
        assert launcher.asked[-1][1] == 3 and world.gateway.told[-1] == [(0, 1)]
        await asyncio.sleep(2)
        assert world.gateway.told[-1] == [(0, 1), (1, 1), (2, 1)]
        assert scaler.counts() == {"wanted": 3, "registered": 3, "serving": 3}
        assert (await scaler.scale(3)).message == "there are 3 already"

    run(main())


def test_fewer_engines_end_only_when_they_have_finished_what_they_have() -> None:
    async def main() -> None:
        world, scaler, launcher = await made(Loaded(), Loaded(until=5.0), Loaded(until=9.0))
        assert (await scaler.scale(1)).ok
        assert world.gateway.told[-1] == [(0, 1)], "no new turns from now on"
        await asyncio.sleep(8)
        assert launcher.asked == [] and len(world.fleet.engines) == 3
        assert scaler.describe()[0].startswith("engine-1 is leaving")
        await asyncio.sleep(3)
        assert [number for _, number in launcher.asked] == [1]
        assert scaler.counts() == {"wanted": 1, "registered": 1, "serving": 1}

    run(main())


def test_one_that_does_not_finish_is_ended_at_its_deadline() -> None:
    async def main() -> None:
        _, scaler, launcher = await made(Loaded(), Loaded(until=1e6))
        await scaler.scale(1)
        await asyncio.sleep(DRAIN_S + 2)
        ((when, number),) = launcher.asked
        assert number == 1 and when == pytest.approx(DRAIN_S, abs=1)

    run(main())


def test_one_that_is_wanted_again_while_it_leaves_stays() -> None:
    async def main() -> None:
        world, scaler, launcher = await made(Loaded(), Loaded(until=1e6))
        await scaler.scale(1)
        await asyncio.sleep(3)
        await scaler.scale(2)
        await asyncio.sleep(2 * DRAIN_S)
        assert [number for _, number in launcher.asked] == [2], "it was never told to end one"
        assert world.gateway.told[-1] == [(0, 1), (1, 1)]

    run(main())


def test_what_cannot_be_done_is_refused_with_the_reason_and_changes_nothing() -> None:
    async def main() -> None:
        world, scaler, _ = await made(Loaded(), refused="each takes 1 GPU, and 0 of 2 are free")
        reply = await scaler.scale(2)
        assert not reply.ok and "0 of 2 are free" in reply.message and scaler.wanted == 1
        assert not (await scaler.scale(0)).ok
        _, alone, _ = await made(Loaded(), attached=False)
        reply = await alone.scale(2)
        assert not reply.ok and "--set engine.replicas=2" in reply.message
        assert world.gateway.told[-1] == [(0, 1)]

    run(main())


def test_a_launcher_that_does_not_answer_is_said_to() -> None:
    async def main() -> None:
        _, scaler, launcher = await made(Loaded())

        async def silent(*_: object, **__: object) -> Scaled:
            raise WireError("scale: peer did not answer within 15 s")

        launcher.call = silent  # type: ignore[method-assign]
        reply = await scaler.scale(2)
        assert not reply.ok and "the launcher does not answer" in reply.message

    run(main())


def test_who_is_missed() -> None:
    async def main() -> None:
        world, scaler, _ = await made(Loaded())
        needs = world.needs  # type: ignore[attr-defined]
        assert needs(RoleExited("engine", 0, 1, False)), "the run began with it"
        assert needs(RoleExited("trainer", 0, 1, False))
        await scaler.scale(3)
        await asyncio.sleep(2)
        assert needs(RoleExited("engine", 2, 1, True)), "it is started again"
        assert not needs(RoleExited("engine", 2, 1, False)), "it was asked for later, and cannot be kept alive"
        await scaler.scale(1)
        assert not needs(RoleExited("engine", 1, 0, False))
        late = SimpleNamespace(role="engine", replica=2, leaving=False)
        scaler._joined(late)  # type: ignore[arg-type]
        assert late.leaving, "it was just starting when it was no longer wanted"

    run(main())
