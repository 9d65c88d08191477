"""The engines as one: every serving engine holds exactly one whole, verified version.

A version is brought to all serving engines at once, each with a deadline of its own. One that hangs, or fails twice, is
ended (the launcher starts it again) and the others go on. One that joins installs and verifies the newest version
before it serves, and nobody waits for it. One that leaves gets no new turns and no new versions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import cast

from prl.controller.hub import Connection, Hub
from prl.engine.probes import worst
from prl.errors import PrlError, RunFailed, WeightsError, WireError
from prl.messages import SET_ENGINES, EngineAddress, EngineGauges, EngineHealth, EngineSet, Installed, WeightsRef
from prl.plan import ENGINE
from prl.protocols import EngineClient, EnginePlugin, SleepingEngineClient

log = logging.getLogger(__name__)

INSTALL_TIMEOUT_S = 300.0
RESTART_WAIT_S = 900.0
"""How long a run without any engine waits for one to be started again: a large model is read from disk in minutes."""
RETRY_PAUSE_S = 1.0
"""Between an install that failed and the second try: by then the launcher has reported a process that died."""
_GAUGES = ("kv_usage", "running", "waiting", "preemptions", "capacity")

EndEngine = Callable[[Connection, str], None]
"""Called with an engine that cannot go on and the reason; it makes an end of the process."""


@dataclass(eq=False)
class Engine:
    """One registered engine.

    Args:
        holds: the version it serves with, None before it has caught up.
        reading: the version that is being installed.
        said: what it answered to the last one that it installed.
        late: it has installed one, and there was a newer one by then.
        asleep: it was told to free the memory of its GPU.
        task: brings it to the newest version, and returns why that was not possible.
        since: when it began what it is doing, in `time.monotonic()` seconds.
    """

    connection: Connection
    client: EngineClient
    holds: WeightsRef | None = None
    reading: WeightsRef | None = None
    said: Installed = field(default_factory=Installed)
    late: bool = False
    asleep: bool = False
    task: asyncio.Task[PrlError | None] | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def replica(self) -> int:
        return self.connection.replica

    @property
    def serves(self) -> bool:
        return self.holds is not None and not self.connection.leaving


class WireFleet:
    """Engines by replica. One that registers installs and verifies the current version before it serves.

    Args:
        on_change: called when who serves, or with what, has changed.
        end: see `EndEngine`; the default only forgets it.
        install_timeout_s: how long one engine may take for one version, its second try included.
    """

    def __init__(
        self,
        hub: Hub,
        plugin: EnginePlugin,
        token: str,
        on_change: Callable[[], None],
        *,
        end: EndEngine | None = None,
        install_timeout_s: float = INSTALL_TIMEOUT_S,
    ) -> None:
        self._hub = hub
        self._plugin = plugin
        self._token = token
        self._on_change = on_change
        self._end = end or hub.lose
        self._timeout = install_timeout_s
        self.engines: dict[int, Engine] = {}
        self._current: WeightsRef | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._version = 0
        self._resting = False
        """From `sleep` to the next install: one that joins meanwhile sleeps, too."""
        hub.on_joined.append(self._joined)
        hub.on_left.append(self._left)
        for connection in hub.of(ENGINE):
            self._joined(connection)

    @property
    def version(self) -> int:
        return self._version

    def serving(self) -> list[Engine]:
        return [engine for _, engine in sorted(self.engines.items()) if engine.serves]

    def reading(self) -> set[int]:
        """Versions that an engine is reading: they must not be released."""
        return {engine.reading.version for engine in self.engines.values() if engine.reading is not None}

    def gauges(self) -> list[EngineGauges]:
        """Of every serving engine, from its last heartbeat. One that keeps none of the names says nothing: zeros, as
        does what is not a number of anything (NaN, infinite, negative), which would stay in every mean."""
        now, found = time.monotonic(), []
        for engine in self.serving():
            connection = engine.connection
            known = {name: _amount(connection.gauges.get(name, 0.0)) for name in _GAUGES}
            found.append(EngineGauges(engine.replica, age_s=now - connection.seen, **known))
        return found

    def describe(self) -> list[str]:
        """One line for every engine that does not serve, or is being brought to another version."""
        lines = []
        for engine in self.engines.values():
            label, seconds = engine.connection.label, time.monotonic() - engine.since
            if engine.connection.leaving:
                lines.append(f"{label} is leaving: it finishes what it has (for {seconds:.1f} s)")
            elif engine.reading is not None:
                limit = f"at most {max(0.0, self._timeout - seconds):.0f} s more"
                lines.append(f"{label} installs version {engine.reading.version} (for {seconds:.1f} s, {limit})")
        return lines

    # --- new versions ---------------------------------------------------------------------------------------

    async def install(self, weights: WeightsRef) -> Installed:
        """Bring every engine to `weights`; return when at least one serves it and none serves another. An engine that
        joins is waited for only if there is no other, or once it has installed a version and is still behind.

        Returns:
            The largest figures of those that serve it.

        Raises:
            WeightsError: every engine refused it. RunFailed: no engine is left, and none came back in time.
        """
        self._current, self._resting = weights, False
        present = [engine for engine in self.engines.values() if not engine.connection.leaving]
        waited = [engine for engine in present if engine.task is None or engine.serves or engine.late]
        errors = await asyncio.gather(*(self._driven(engine) for engine in waited))
        failed = [(engine, error) for engine, error in zip(waited, errors, strict=True) if error is not None]
        refusal = next((error for _, error in failed if isinstance(error, WeightsError)), None)
        if refusal is not None and len(failed) == len(waited):
            raise refusal  # it is the weights, and would be refused again
        for engine, error in failed:
            self._give_up(engine, error)
        await self._wait_for_engine(weights)
        self._announce()
        return worst([engine.said for engine in self.serving() if engine.holds == weights])

    async def sleep(self) -> None:
        """Every engine frees its GPU's memory until the next install. One that cannot is ended."""
        self._resting = True
        await asyncio.gather(*(self._lull(engine) for engine in list(self.engines.values())))

    async def _lull(self, engine: Engine) -> None:
        engine.asleep = True  # from now on: an install that comes before the answer must wake it
        try:
            await cast(SleepingEngineClient, engine.client).sleep()
        except PrlError as error:
            self._give_up(engine, WireError(f"{engine.connection.label} cannot free its GPU's memory: {error}"))

    async def close(self) -> None:
        for engine in list(self.engines.values()):
            if engine.task is not None:
                engine.task.cancel()
            await engine.client.close()

    def _driven(self, engine: Engine) -> asyncio.Task[PrlError | None]:
        """The task that brings an engine to the newest version, which may be under way."""
        if engine.task is None:
            engine.task = asyncio.create_task(self._drive(engine))
        return engine.task

    async def _drive(self, engine: Engine) -> PrlError | None:
        """Until it holds the newest version, is gone or leaves. Returns the error when it failed twice or hung."""
        try:
            while (weights := self._current) is not None and weights != engine.holds and self._wanted(engine):
                engine.reading, engine.since = weights, time.monotonic()
                error = await self._bring(engine, weights)
                if not self._wanted(engine):
                    return None
                if error is not None:
                    return error
                engine.reading = None
                if engine.holds is None and weights != self._current:
                    engine.late = True  # it does not serve what the others have left behind; the next one waits for it
                else:
                    engine.holds = weights
            return None
        finally:
            engine.reading = engine.task = None

    async def _bring(self, engine: Engine, weights: WeightsRef) -> PrlError | None:
        """Install and verify one version, with a second try; the error of that, or None."""
        what = f"{engine.connection.label} cannot install version {weights.version}"
        try:
            async with asyncio.timeout(self._timeout):
                return await self._twice(engine, weights, what)
        except TimeoutError:
            return WireError(f"{what}: it took longer than engine.install_timeout_s = {self._timeout:g} s")

    async def _twice(self, engine: Engine, weights: WeightsRef, what: str) -> PrlError | None:
        try:
            await self._installed(engine, weights)
            return None
        except PrlError as error:
            # Once more: a read that raced the file system, a connection that was cut, or an error of the engine that
            # it survived, is no reason to start it again. A dead engine is known to be gone after the pause.
            await asyncio.sleep(RETRY_PAUSE_S)
            if not self._wanted(engine):
                return None
            log.warning("%s: %s; trying again", engine.connection.label, error)
            if not isinstance(error, WeightsError):
                await self._connect_again(engine)
        try:
            await self._installed(engine, weights)
            return None
        except PrlError as error:
            kind = WeightsError if isinstance(error, WeightsError) else WireError
            return kind(f"{what}: {error}")

    async def _installed(self, engine: Engine, weights: WeightsRef) -> None:
        if engine.asleep:
            await cast(SleepingEngineClient, engine.client).wake()
            engine.asleep = False
        engine.said = await engine.client.install(weights)

    async def _wait_for_engine(self, weights: WeightsRef) -> None:
        deadline = asyncio.get_running_loop().time() + RESTART_WAIT_S
        while not self.serving():
            if asyncio.get_running_loop().time() > deadline:
                raise RunFailed(
                    f"no engine serves version {weights.version}, and none came back within {RESTART_WAIT_S:g} s",
                    log="logs/engine-0.log",
                )
            await asyncio.sleep(0.05)

    # --- engines that come, leave, and fail -----------------------------------------------------------------

    async def retire(self, first: int) -> None:
        """Replicas from `first` on get no new turns; returns when the gateways know."""
        for engine in self.engines.values():
            if engine.replica >= first and not engine.connection.leaving:
                engine.connection.leaving, engine.since = True, time.monotonic()
        engines = EngineSet(self._announce())
        calls = [gateway.peer.call(SET_ENGINES, engines, timeout=10.0) for gateway in self._hub.of("gateway")]
        await asyncio.gather(*calls, return_exceptions=True)

    def keep(self, count: int) -> None:
        """Replicas below `count` that were leaving are wanted again: at the newest version they serve."""
        for engine in self.engines.values():
            if engine.replica < count and engine.connection.leaving:
                engine.connection.leaving = False
                engine.holds = engine.holds if engine.holds == self._current else None
                self._bring_in_background(engine)

    async def health(self, engine: Engine, timeout: float) -> EngineHealth:
        """What it says of itself. A connection that was cut is made again, once.

        Raises:
            WireError: it does not answer in time, or with an error.
        """
        try:
            async with asyncio.timeout(timeout):
                try:
                    return await engine.client.health()
                except WireError:
                    if engine.reading is not None or not self._wanted(engine):
                        raise  # whoever installs sees to the connection
                    await self._connect_again(engine)
                    return await engine.client.health()
        except TimeoutError:
            raise WireError(f"it did not answer within {timeout:g} s") from None

    async def _connect_again(self, engine: Engine) -> None:
        former, engine.client = engine.client, self._plugin.connect(engine.connection.address, self._token)
        await former.close()

    def _wanted(self, engine: Engine) -> bool:
        return self.engines.get(engine.replica) is engine and not engine.connection.leaving

    def _give_up(self, engine: Engine, error: PrlError) -> None:
        if self.engines.get(engine.replica) is engine:
            self._end(engine.connection, str(error))

    def _announce(self) -> list[EngineAddress]:
        """Tell the gateway who serves, and the loop what is sampled with from now on."""
        engines = [
            EngineAddress(engine.replica, engine.connection.address, engine.holds.version)
            for engine in self.serving()
            if engine.holds is not None
        ]
        if engines:
            self._version = min(engine.version for engine in engines)
        for gateway in self._hub.of("gateway"):
            gateway.peer.notify(SET_ENGINES, EngineSet(engines))
        self._on_change()
        return engines

    def _joined(self, connection: Connection) -> None:
        if connection.role == "gateway":
            self._announce()
        elif connection.role == ENGINE:
            client = self._plugin.connect(connection.address, self._token)
            engine = self.engines[connection.replica] = Engine(connection, client)
            if self._resting:
                self._keep_task(self._lull(engine))
            elif self._current is not None and not connection.leaving:
                self._bring_in_background(engine)

    def _bring_in_background(self, engine: Engine) -> None:
        self._keep_task(self._bring_back(engine, self._driven(engine)))

    async def _bring_back(self, engine: Engine, task: asyncio.Task[PrlError | None]) -> None:
        error: PrlError | None
        try:
            error = await task
        except Exception as bug:
            log.exception("%s cannot be brought to a version", engine.connection.label)
            error = WireError(f"{type(bug).__name__}: {bug}")
        if error is not None:
            self._give_up(engine, error)
        elif engine.serves:
            self._announce()

    def _left(self, connection: Connection, why: str) -> None:
        engine = self.engines.get(connection.replica)
        if connection.role != ENGINE or engine is None or engine.connection is not connection:
            return
        del self.engines[connection.replica]
        self._keep_task(engine.client.close())
        self._announce()

    def _keep_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _amount(value: float) -> float:
    return value if 0 <= value < math.inf else 0.0
