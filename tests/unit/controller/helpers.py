"""A fleet without sockets: a hub of one gateway and some engines that do what a script says. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from prl.controller.fleet import WireFleet
from prl.controller.hub import Connection
from prl.errors import WeightsError, WireError
from prl.messages import EngineSet, Installed, WeightsRef
from prl.testing.fake_engine import FakeEngine

LIMIT_S = 30.0
"""engine.install_timeout_s of these tests."""


class Gateway:
    """Remembers which engines it was told to use: (replica, version) of each."""

    def __init__(self) -> None:
        self.told: list[list[tuple[int, int]]] = []

    def notify(self, method: object, engines: EngineSet) -> None:
        self.told.append(sorted((engine.replica, engine.version) for engine in engines.engines))

    async def call(self, method: object, engines: EngineSet, *, timeout: float) -> None:
        self.notify(method, engines)


class World:
    """A hub of one gateway and some engines, without sockets; `engines` are behind their addresses."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.gateway = Gateway()
        self.behind: dict[str, FakeEngine] = {}
        self.connections: dict[tuple[str, int], Connection] = {}
        self.on_joined: list[Callable[[Connection], None]] = []
        self.on_left: list[Callable[[Connection, str], None]] = []
        self.ended: list[tuple[int, str]] = []
        """Replicas that the fleet had killed, and why; `restarts` are those that come back for it, after 5 s."""
        self.changed: Callable[[], None] = lambda: None
        self.restarts: dict[int, FakeEngine] = {}
        self._join("gateway", 0, self.gateway)
        self.fleet = WireFleet(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            "token",
            lambda: self.changed(),
            end=self._end,
            install_timeout_s=LIMIT_S,
        )
        for replica, engine in enumerate(engines):
            self.join(replica, engine)

    def of(self, role: str) -> list[Connection]:
        return [connection for (name, _), connection in sorted(self.connections.items()) if name == role]

    def connect(self, address: str, token: str) -> FakeEngine:
        return self.behind[address]

    def join(self, replica: int, engine: FakeEngine) -> None:
        self.behind[f"engine:{replica}"] = engine
        self._join("engine", replica, SimpleNamespace())

    def leave(self, replica: int) -> None:
        connection = self.connections.pop(("engine", replica))
        for observer in self.on_left:
            observer(connection, "killed")

    def _end(self, connection: Connection, why: str) -> None:
        replica = connection.replica
        self.ended.append((replica, why))
        self.leave(replica)
        if replica in self.restarts:
            asyncio.get_running_loop().call_later(5.0, self.join, replica, self.restarts.pop(replica))

    def _join(self, role: str, replica: int, peer: Any) -> None:
        connection = Connection(role, replica, peer, f"{role}:{replica}", 0, {})
        self.connections[role, replica] = connection
        for observer in self.on_joined:
            observer(connection)


class Scripted(FakeEngine):
    """`install` does what the script says, one entry for every call; then it succeeds."""

    def __init__(self, *script: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.script = list(script)
        self.calls = 0
        self.at_once = 0

    async def install(self, weights: WeightsRef) -> Installed:
        self.calls += 1
        self.at_once += 1
        assert self.at_once == 1, "two installs at once"
        try:
            await asyncio.sleep(1.0)
            if self.script:
                await self.script.pop(0)()
            return await super().install(weights)
        finally:
            self.at_once -= 1


async def refuses() -> None:
    raise WeightsError("checksum of 00000.safetensors")


async def drops() -> None:
    raise WireError("engine-0 closed the connection")


async def hangs() -> None:
    await asyncio.Event().wait()


def ref(version: int) -> WeightsRef:
    return WeightsRef(version, 0, f"fake:{version}")
