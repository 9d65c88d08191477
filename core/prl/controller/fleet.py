"""The engines as one: every serving engine holds exactly one whole, verified version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prl.controller.hub import Connection, Hub
from prl.errors import RunFailed, WeightsError, WireError
from prl.messages import SET_ENGINES, EngineAddress, EngineGauges, EngineSet, WeightsRef
from prl.protocols import EngineClient, EnginePlugin

log = logging.getLogger(__name__)

RESTART_WAIT_S = 300.0
"""How long a run without any engine waits for one to be started again."""
RETRY_PAUSE_S = 1.0
"""Between an install that failed and the second try: by then the launcher has reported a process that died."""
_GAUGES = ("kv_usage", "running", "waiting", "preemptions", "capacity")


class WireFleet:
    """Engines by replica. One that registers installs and verifies the current version before it serves."""

    def __init__(self, hub: Hub, plugin: EnginePlugin, token: str, on_change: Callable[[], None]) -> None:
        self._hub = hub
        self._plugin = plugin
        self._token = token
        self._on_change = on_change
        self._clients: dict[int, EngineClient] = {}
        self._versions: dict[int, int] = {}
        self._current: WeightsRef | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self._version = 0
        hub.on_joined.append(self._joined)
        hub.on_left.append(self._left)
        for connection in hub.of("engine"):
            self._joined(connection)

    @property
    def version(self) -> int:
        return self._version

    def gauges(self) -> list[EngineGauges]:
        """Of every serving engine, from its last heartbeat. One that keeps none of the names says nothing: zeros."""
        now, found = time.monotonic(), []
        for replica in self._serving():
            connection = self._hub.connections.get(("engine", replica))
            if connection is not None:
                known = {name: connection.gauges.get(name, 0.0) for name in _GAUGES}
                found.append(EngineGauges(replica, age_s=now - connection.seen, **known))
        return found

    async def install(self, weights: WeightsRef) -> None:
        """Bring every engine to `weights`; return when at least one serves it and none serves another.

        Raises:
            WeightsError: an engine refused it. RunFailed: no engine is left, and none came back in time.
        """
        async with self._lock:
            self._current = weights
            results = await asyncio.gather(
                *(self._bring(replica) for replica in list(self._clients)), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, WireError):
                    raise result
        if not self._serving():
            await self._wait_for_engine(weights)
        self._announce()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _bring(self, replica: int) -> None:
        """Install and verify in one engine. One that dies meanwhile is simply gone.

        Raises:
            WeightsError: it refused, or could not, twice, and is still there.
        """
        client, weights = self._clients[replica], self._current
        assert weights is not None
        try:
            await client.install(weights)
        except (WeightsError, WireError) as error:
            # Once more: a read that raced the file system, or an error of the engine that it survived, is no reason
            # to end a run. A dead engine is known to be gone after the pause.
            await asyncio.sleep(RETRY_PAUSE_S)
            if self._clients.get(replica) is not client:
                return
            log.warning("engine-%d: %s; trying again", replica, error)
            await self._once_more(replica, client, weights)
        if self._clients.get(replica) is client:
            self._versions[replica] = weights.version

    async def _once_more(self, replica: int, client: EngineClient, weights: WeightsRef) -> None:
        try:
            await client.install(weights)
        except WireError as error:
            await asyncio.sleep(RETRY_PAUSE_S)
            if self._clients.get(replica) is client:
                raise WeightsError(f"engine-{replica} cannot install version {weights.version}: {error}") from error

    def _serving(self) -> list[int]:
        current = self._current
        return [] if current is None else [r for r, version in self._versions.items() if version == current.version]

    def _announce(self) -> None:
        """Tell the gateway who serves, and the loop what is sampled with from now on."""
        engines = [
            EngineAddress(replica, self._hub.connections["engine", replica].address, self._versions[replica])
            for replica in self._serving()
            if ("engine", replica) in self._hub.connections
        ]
        if engines:
            self._version = min(engine.version for engine in engines)
        for gateway in self._hub.of("gateway"):
            gateway.peer.notify(SET_ENGINES, EngineSet(engines))
        self._on_change()

    async def _wait_for_engine(self, weights: WeightsRef) -> None:
        deadline = asyncio.get_running_loop().time() + RESTART_WAIT_S
        while not self._serving():
            if self._error is not None:
                raise self._error
            if asyncio.get_running_loop().time() > deadline:
                raise RunFailed(
                    f"no engine serves version {weights.version}, and none came back within {RESTART_WAIT_S:g} s",
                    log="logs/engine-0.log",
                )
            await asyncio.sleep(0.05)

    def _joined(self, connection: Connection) -> None:
        if connection.role == "gateway":
            self._announce()
        elif connection.role == "engine":
            self._clients[connection.replica] = self._plugin.connect(connection.address, self._token)
            if self._current is not None:
                task = asyncio.create_task(self._bring_back(connection.replica))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, replica: int) -> None:
        async with self._lock:
            try:
                if replica in self._clients:
                    await self._bring(replica)
            except WireError as error:
                log.warning("engine-%d: %s", replica, error)
                return
            except Exception as error:
                self._error = error
                log.error("engine-%d cannot serve: %s", replica, error)
                return
        self._announce()

    def _left(self, connection: Connection, why: str) -> None:
        if connection.role != "engine":
            return
        client = self._clients.pop(connection.replica, None)
        self._versions.pop(connection.replica, None)
        if client is not None:
            task = asyncio.create_task(client.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._announce()
