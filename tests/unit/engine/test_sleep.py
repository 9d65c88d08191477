"""Sleeping through the wire: the server asks its backend once, and says no for one that cannot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prl.engine.client import WireEngineClient
from prl.engine.server import EngineServer
from prl.errors import WireError
from prl.messages import Installed, WeightsRef
from prl.wire import Server


class Plain:
    """As much of a backend as is asked for here."""

    version = incarnation = load = 0
    busy = 0.0

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self, deliver: Any) -> None: ...
    def add(self, requests: Any) -> None: ...
    def abort(self, keys: Any) -> None: ...
    def info(self) -> dict[str, Any]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...
    async def score(self, sequences: Any) -> list[list[float]]:
        return []

    async def pause(self) -> None:
        self.done.append("pause")

    async def resume(self) -> None:
        self.done.append("resume")

    async def install(self, weights: WeightsRef) -> Installed:
        self.done.append("install")
        return Installed()


class Sleeping(Plain):
    async def sleep(self) -> None:
        self.done.append("sleep")

    async def wake(self) -> None:
        self.done.append("wake")


def through_the_wire(backend: Plain, ask: Any) -> None:
    async def main() -> None:
        engine = EngineServer(backend)
        server = Server("t", engine.handlers())
        client = WireEngineClient(server.start(), "t")
        try:
            await asyncio.wait_for(ask(client), 20)
        finally:
            await client.close()
            server.close()

    asyncio.run(main())


def test_it_sleeps_and_wakes_once_and_says_so() -> None:
    async def ask(client: WireEngineClient) -> None:
        await client.sleep()
        await client.sleep()
        assert (await client.health()).paused
        await client.wake()
        await client.wake()
        assert not (await client.health()).paused
        await client.install(WeightsRef(1, 0, "here"))

    backend = Sleeping()
    through_the_wire(backend, ask)
    assert backend.done == ["sleep", "wake", "install"]


def test_an_engine_that_cannot_sleep_says_so() -> None:
    async def ask(client: WireEngineClient) -> None:
        with pytest.raises(WireError, match=r"cannot free its GPU's memory while it runs: set engine.sleep = false"):
            await client.sleep()
        assert not (await client.health()).paused

    through_the_wire(Plain(), ask)
