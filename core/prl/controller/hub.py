"""Where every role of a run registers, reports and is called."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prl.errors import RunFailed, WireError
from prl.launching import ROLE_EXITED, RoleExited, StillNeeded
from prl.messages import NOTHING, REGISTER, STATUS, Nothing, Register, RoleStatus, Welcome
from prl.wire import Handlers, Peer, Server

log = logging.getLogger(__name__)


@dataclass
class Connection:
    """One registered process. `busy` is its cumulative seconds of useful work; `seen` when it last spoke."""

    role: str
    replica: int
    peer: Peer
    address: str
    pid: int
    info: dict[str, Any]
    host: str = ""
    busy: float = 0.0
    doing: str = ""
    gauges: dict[str, float] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)
    leaving: bool = False
    """No longer wanted: it finishes what it has, and its end is no failure."""

    @property
    def label(self) -> str:
        return f"{self.role}-{self.replica}"


class Hub:
    """`on_joined(connection)` and `on_left(connection, why)` are called for every role that comes and goes."""

    def __init__(self, token: str, run_id: str, incarnation: int, version: int, handlers: Handlers) -> None:
        self._run_id = run_id
        self._welcome = Welcome(incarnation, version)
        self.server = Server(
            token,
            {REGISTER: self._register, STATUS: self._status, ROLE_EXITED: self._exited, **handlers},
        )
        self.connections: dict[tuple[str, int], Connection] = {}
        self.on_joined: list[Callable[[Connection], None]] = []
        self.on_left: list[Callable[[Connection, str], None]] = []
        self.needed = True
        """False once the run is over: a role that ends then has not failed."""
        self.needs: Callable[[RoleExited], bool] = lambda event: True
        """Whether a process that ended is missed while the run goes on."""
        self._aborted = ""
        self._changed = asyncio.Event()
        self._ended: dict[tuple[str, int], str] = {}

    def of(self, role: str) -> list[Connection]:
        """The registered replicas of a role, by number."""
        return [c for (name, _), c in sorted(self.connections.items()) if name == role]

    async def wait_for(self, role: str, replicas: int, timeout: float) -> list[Connection]:
        """Wait until so many replicas of a role are registered.

        Raises:
            RunFailed: they are not after `timeout` seconds, or `abort` was called.
        """
        deadline = time.monotonic() + timeout
        while len(self.of(role)) < replicas:
            if self._aborted:
                raise RunFailed(self._aborted)
            self._changed.clear()
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunFailed(
                    f"{role} did not register within {timeout:g} s ({len(self.of(role))} of {replicas} did)",
                    log=f"logs/{role}-0.log",
                )
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return self.of(role)

    def abort(self, why: str) -> None:
        """Nobody waits for a role any more."""
        self._aborted = why
        self._changed.set()

    def end(self, connection: Connection, why: str) -> None:
        """Kill a role that does not do its work; the launcher starts it again. One on another machine is forgotten."""
        if connection.host == os.uname().nodename:
            self._ended[connection.role, connection.replica] = why
            with contextlib.suppress(ProcessLookupError):
                os.kill(connection.pid, signal.SIGKILL)
        self.lose(connection, why)

    def lose(self, connection: Connection, why: str) -> None:
        """A role is gone: forget it and fail what waits for it."""
        if self.connections.get((connection.role, connection.replica)) is not connection:
            return
        del self.connections[connection.role, connection.replica]
        self.server.drop(connection.peer, why)
        if self.needed:
            log.log(logging.INFO if connection.leaving else logging.WARNING, "%s is gone: %s", connection.label, why)
            for observer in self.on_left:
                observer(connection, why)
        self._changed.set()

    def _register(self, peer: Peer, request: Register) -> Welcome:
        if request.run_id != self._run_id:
            raise WireError(f"this is run {self._run_id!r}, not {request.run_id!r}")
        former = self.connections.get((request.role, request.replica))
        if former is not None:
            self.lose(former, "it was started again")
        peer.name = f"{request.role}-{request.replica}"
        connection = Connection(
            request.role, request.replica, peer, request.address, request.pid, request.info, request.host
        )
        self.connections[request.role, request.replica] = connection
        log.info("%s registered (pid %d)", connection.label, connection.pid)
        self._changed.set()
        for observer in self.on_joined:
            observer(connection)
        return self._welcome

    def _status(self, peer: Peer, request: RoleStatus) -> Nothing:
        connection = self.connections.get((request.role, request.replica))
        if connection is not None and connection.peer is peer:
            connection.busy, connection.doing, connection.gauges = request.busy, request.doing, request.gauges
            connection.seen = time.monotonic()
        return NOTHING

    def _exited(self, peer: Peer, request: RoleExited) -> StillNeeded:
        """The launcher saw a process end: what waits for it must not wait any longer."""
        connection = self.connections.get((request.role, request.replica))
        if connection is not None:
            how = f"killed by signal {-request.code}" if request.code < 0 else f"exit code {request.code}"
            self.lose(connection, f"its process ended ({how}){'; it is started again' * request.will_restart}")
        why = self._ended.pop((request.role, request.replica), "")
        return StillNeeded(self.needed and self.needs(request), why)
