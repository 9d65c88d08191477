"""Engines that speak and do not work.

Every engine is asked for its health, and has `loop.silent_after_s` to answer. It is ended, with an event and the
reason, when it does not answer, answers with an error, says that it holds another version than it acknowledged, or has
had requests for so long without computing anything. The launcher starts it again; it installs the current version
before it serves, and its requests are tried again elsewhere. While a version is installed, the deadline of that holds
instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prl.controller.fleet import Engine, WireFleet
from prl.errors import PrlError
from prl.messages import EngineHealth

CHECKS = 4
"""Looks within one limit."""


async def end_unhealthy_engines(fleet: WireFleet, limit: float, end: Callable[[Engine, str], None]) -> None:
    """Look after every engine, for ever; `end` is called with one that has to go, and why."""
    watches: dict[Engine, asyncio.Task[None]] = {}
    try:
        while True:
            present = list(fleet.engines.values())
            for engine in present:
                if engine not in watches:
                    watches[engine] = asyncio.create_task(_watch(fleet, engine, limit, end))
            for engine in [engine for engine in watches if engine not in present]:
                watches.pop(engine).cancel()
            await asyncio.sleep(limit / CHECKS)
    finally:
        for task in watches.values():
            task.cancel()
        await asyncio.gather(*watches.values(), return_exceptions=True)


async def _watch(fleet: WireFleet, engine: Engine, limit: float, end: Callable[[Engine, str], None]) -> None:
    clock = asyncio.get_running_loop().time
    busy, since = -1.0, clock()
    while True:
        await asyncio.sleep(limit / CHECKS)
        installed = engine.reading is not None
        health: EngineHealth | None = None
        try:
            health = await fleet.health(engine, limit)
        except PrlError as error:
            why = f"its health could not be asked: {error} (limit loop.silent_after_s = {limit:g} s)"
        if installed or engine.reading is not None:  # the deadline of that holds, and what it holds may have changed
            busy, since = -1.0, clock()
            continue
        if health is not None:
            if health.paused or not health.load:
                busy, since = -1.0, clock()
            elif health.busy != busy:
                busy, since = health.busy, clock()
            why = _wrong_version(engine, health) or _stalled(health, clock() - since, limit)
        if why:
            end(engine, why)
            return


def _stalled(health: EngineHealth, seconds: float, limit: float) -> str:
    if seconds <= limit:
        return ""
    return (
        f"it has had {health.load} requests for {seconds:.1f} s and computed nothing "
        f"(limit loop.silent_after_s = {limit:g} s)"
    )


def _wrong_version(engine: Engine, health: EngineHealth) -> str:
    holds = engine.holds
    if holds is None or (holds.version, holds.incarnation) == (health.version, health.incarnation):
        return ""
    return (
        f"it says that it holds version {health.version} of incarnation {health.incarnation}, and has acknowledged "
        f"version {holds.version} of incarnation {holds.incarnation}"
    )
