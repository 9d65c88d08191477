"""Engines that speak and do not work: which of them are ended, and for which reason. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from prl.controller.fleet import Engine
from prl.controller.health import end_unhealthy_engines
from prl.errors import WireError
from prl.messages import EngineHealth
from prl.testing.clock import run
from prl.testing.fake_engine import FakeEngine

from .helpers import Scripted, World, ref

LIMIT = 8.0


class Patient(FakeEngine):
    """`says` is its health; an exception is raised, None is never answered."""

    def __init__(self, says: Callable[[float], EngineHealth | Exception | None]) -> None:
        super().__init__()
        self.says = says
        self.asked = 0

    async def health(self) -> EngineHealth:
        self.asked += 1
        found = self.says(asyncio.get_running_loop().time())
        if found is None:
            await asyncio.Event().wait()
            raise AssertionError
        if isinstance(found, Exception):
            raise found
        return found


def ended(engine: FakeEngine, *, seconds: float = 60.0) -> tuple[list[str], float]:
    """Why it was ended, in a fleet that brought it to version 1, and when."""
    whys: list[str] = []

    async def main() -> float:
        world = World(engine)
        await world.fleet.install(ref(1))
        done = asyncio.Event()

        def end(found: Engine, why: str) -> None:
            whys.append(why)
            world.leave(found.replica)
            done.set()

        task = asyncio.create_task(end_unhealthy_engines(world.fleet, LIMIT, end))
        waiting = [asyncio.create_task(done.wait()), asyncio.create_task(asyncio.sleep(seconds))]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        ended_at = asyncio.get_running_loop().time()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for one in waiting:
            one.cancel()
        return ended_at

    return whys, run(main())


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda now: None, "did not answer within 8 s"),
        (lambda now: WireError("a thread of it died"), "a thread of it died"),
        (lambda now: EngineHealth(0, 0, False, 0, now), "says that it holds version 0 of incarnation 0"),
        (lambda now: EngineHealth(1, 0, False, 3, 5.0), "has had 3 requests for .* and computed nothing"),
    ],
)
def test_one_that_does_not_work_is_ended_within_its_time(
    says: Callable[[float], EngineHealth | Exception | None], why: str
) -> None:
    import re

    whys, at = ended(Patient(says))
    assert len(whys) == 1 and re.search(why, whys[0]), whys
    assert "loop.silent_after_s" in whys[0] or "acknowledged" in whys[0]
    assert at <= 2 * LIMIT


@pytest.mark.parametrize(
    "says",
    [
        lambda now: EngineHealth(1, 0, False, 0, 5.0),  # nothing to do
        lambda now: EngineHealth(1, 0, False, 3, now),  # it computes
        lambda now: EngineHealth(1, 0, True, 3, 5.0),  # it is paused
        lambda now: EngineHealth(1, 0, False, 3 if now % 10 < 5 else 0, 5.0),  # short ones, cheaper than its clock
    ],
)
def test_one_that_works_or_has_nothing_to_do_is_left_alone(says: Callable[[float], EngineHealth]) -> None:
    engine = Patient(says)
    whys, at = ended(engine)
    assert whys == [] and at >= 60
    assert engine.asked >= 20


def test_while_a_version_is_installed_its_deadline_holds() -> None:
    class Installing(Scripted):
        async def health(self) -> EngineHealth:
            if self.at_once:
                raise WireError("busy")
            return await super().health()

    async def main() -> None:
        world = World(Installing(lambda: asyncio.sleep(0), lambda: asyncio.sleep(25)))
        await world.fleet.install(ref(1))
        whys: list[str] = []
        task = asyncio.create_task(end_unhealthy_engines(world.fleet, LIMIT, lambda engine, why: whys.append(why)))
        await asyncio.sleep(5)
        await world.fleet.install(ref(2))
        await asyncio.sleep(20)
        task.cancel()
        assert whys == [] and world.fleet.version == 2

    run(main())
