"""How many engines there are, while the run goes on.

The launcher that can change it says so once (`LAUNCHER`) and is told the number wanted (`SCALE`). More: it starts them,
and the fleet takes each in when it holds the current version. Fewer: the last ones get no new turns, finish what they
have within `engine.drain_timeout_s` (the rest is tried again elsewhere), and only then are stopped.

The number is the run's, not the configuration's: a run that is resumed begins with `engine.replicas` again.
"""

from __future__ import annotations

import asyncio
import logging

from prl.controller.fleet import Engine, WireFleet
from prl.controller.hub import Connection, Hub
from prl.errors import PrlError, WireError
from prl.launching import LAUNCHER, SCALE, LauncherHello, RoleExited, Scaled, ScaleRole
from prl.loop.state import Sink
from prl.messages import NOTHING, ControlReply, Nothing
from prl.plan import ENGINE
from prl.wire import Handlers, Peer

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks at an engine that is to finish what it has."""
ANSWER_S = 15.0
"""How long the launcher may take to say whether it can be done."""


class Scaler:
    """Args:
    configured: how many engines the run began with.
    drain_timeout_s: how long one that is no longer wanted may take for its requests.
    """

    def __init__(self, sink: Sink, configured: int, drain_timeout_s: float) -> None:
        self.wanted = configured
        self._configured = configured
        self._sink = sink
        self._timeout = drain_timeout_s
        self._fleet: WireFleet | None = None
        self._launcher: Peer | None = None
        self._roles: list[str] = []
        self._draining: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    def attach(self, hub: Hub) -> None:
        """Have the hub ask which engines are wanted, before the fleet sees them."""
        hub.needs = self._needs
        hub.on_joined.insert(0, self._joined)

    def begin(self, fleet: WireFleet) -> None:
        self._fleet = fleet

    def handlers(self) -> Handlers:
        return {LAUNCHER: self._hello}

    async def scale(self, engines: int) -> ControlReply:
        """Change the number of engines; returns when it is under way."""
        async with self._changing:
            ok, message = await self._change(engines)
        return ControlReply(ok, message, self.counts())

    def counts(self) -> dict[str, int]:
        """How many are wanted, have registered, and serve."""
        fleet = self._fleet
        registered, serving = (len(fleet.engines), len(fleet.serving())) if fleet is not None else (0, 0)
        return {"wanted": self.wanted, "registered": registered, "serving": serving}

    def describe(self) -> list[str]:
        """Lines for `why-stuck`: engines that are missing, and what those that do not serve are doing."""
        if self._fleet is None:
            return []
        missing = self.wanted - len(self._fleet.engines)
        lines = [f"{missing} of {self.wanted} engines are not there: see logs/launcher-0.log"] if missing > 0 else []
        return lines + self._fleet.describe()

    async def _change(self, engines: int) -> tuple[bool, str]:
        refusal = self._refusal(engines)
        if refusal or self._fleet is None:
            return False, refusal
        former = self.wanted
        if engines == former and len(self._fleet.engines) == engines:
            return True, f"there are {engines} already"
        await self._stop_draining()
        if engines < former:
            self.wanted = engines
            await self._fleet.retire(engines)
            how = f"the others finish what they have, for {self._timeout:g} s (engine.drain_timeout_s) at most"
        else:
            refusal = await self._tell(engines)
            if not refusal:
                self.wanted = engines
                self._fleet.keep(engines)
            how = f"each serves when it holds version {self._fleet.version}"
        self._draining = asyncio.create_task(self._drain(self._fleet, self.wanted))
        if refusal:
            return False, refusal
        message = f"engines: {former} -> {engines}; {how}"
        log.info("%s", message)
        self._sink.event("scaled", role=ENGINE, before=former, wanted=engines)
        return True, message

    async def close(self) -> None:
        await self._stop_draining()

    # --- fewer ----------------------------------------------------------------------------------------------

    async def _drain(self, fleet: WireFleet, engines: int) -> None:
        leaving = [engine for engine in fleet.engines.values() if engine.connection.leaving]
        if not leaving:
            return
        await asyncio.gather(*(self._emptied(fleet, engine) for engine in leaving))
        refusal = await self._tell(engines)
        if refusal:
            log.warning("engines from number %d on are not stopped: %s", engines, refusal)

    async def _emptied(self, fleet: WireFleet, engine: Engine) -> None:
        """Until it has no requests any more, is gone, or its time is over."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        while fleet.engines.get(engine.replica) is engine and clock() < deadline:
            try:
                if not (await fleet.health(engine, min(5.0, max(0.1, deadline - clock())))).load:
                    return
            except PrlError as error:
                log.info("%s leaves, and does not say what it has: %s", engine.connection.label, error)
            await asyncio.sleep(LOOK_S)
        if fleet.engines.get(engine.replica) is engine:
            log.warning(
                "%s had not finished within engine.drain_timeout_s = %g s: its turns are tried again",
                engine.connection.label,
                self._timeout,
            )

    async def _stop_draining(self) -> None:
        task, self._draining = self._draining, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- the launcher, and who is missed --------------------------------------------------------------------

    def _hello(self, peer: Peer, request: LauncherHello) -> Nothing:
        self._launcher, self._roles = peer, request.roles
        return NOTHING

    async def _tell(self, engines: int) -> str:
        """Ask the launcher for so many; why it refuses, or ""."""
        assert self._launcher is not None
        try:
            reply: Scaled = await self._launcher.call(SCALE, ScaleRole(ENGINE, engines), timeout=ANSWER_S)
        except WireError as error:
            return f"the launcher does not answer: {error}"
        return reply.refused

    def _refusal(self, engines: int) -> str:
        if engines < 1:
            return f"engines = {engines}: a run needs at least 1; `prl pause` lets it hold still"
        if self._launcher is None or ENGINE not in self._roles:
            return (
                "the launcher of this run cannot change the number of engines while it goes on: `prl stop`, then "
                f"`prl run ... --resume --set engine.replicas={engines}`"
            )
        return ""

    def _joined(self, connection: Connection) -> None:
        connection.leaving = connection.role == ENGINE and connection.replica >= self.wanted

    def _needs(self, event: RoleExited) -> bool:
        """One that was asked for while the run goes on, and cannot be kept alive, does not end it."""
        if event.role != ENGINE:
            return True
        if event.replica >= self.wanted:
            return False
        if event.will_restart or event.replica < self._configured or not (self._fleet and self._fleet.serving()):
            return True
        log.error("engine-%d is given up: the run goes on without it", event.replica)
        self._sink.event("engine_given_up", replica=event.replica, code=event.code)
        return False
