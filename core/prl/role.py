"""The skeleton every role's process shares: find the controller, register, report, stop.

A role's `__main__` ends with::

    role.main("gateway", serve, run_dir, replica)       # serve(process: RoleProcess) is a coroutine function

`serve` starts what it serves, calls `process.register(handlers, address=...)`, and awaits `process.until_stopped()`.
The process ends when the controller says SHUTDOWN or SIGTERM arrives (exit code 0), and at once, whatever its threads
are doing, when the connection to the controller is lost (exit code 1): nothing outlives a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prl import faults, process
from prl.config.load import read_resolved
from prl.config.schema import RunConfig
from prl.errors import WireError
from prl.messages import NOTHING, REGISTER, SHUTDOWN, STATUS, Register, RoleStatus, Welcome
from prl.rundir import RunDir
from prl.wire import Client, Handlers

log = logging.getLogger(__name__)

FIND_TIMEOUT_S = 300.0
"""How long a role waits for its controller; importing torch on a busy machine has taken a minute."""


class RoleProcess:
    """One role's view of its run. `busy` (seconds of useful work so far), `doing` and `gauges` go into heartbeats."""

    def __init__(self, name: str, run_dir: RunDir, replica: int) -> None:
        self.name = name
        self.run_dir = run_dir
        self.replica = replica
        self.config = read_resolved(run_dir.config, RunConfig)
        self.token = run_dir.token.read_text().strip()
        self.busy = 0.0
        self.doing = "starting"
        self.gauges: dict[str, float] = {}
        self._stopped = asyncio.Event()
        self._link: Client | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def link(self) -> Client:
        """The connection to the controller; both sides may call."""
        assert self._link is not None, "register first"
        return self._link

    async def register(self, handlers: Handlers, *, address: str = "", info: dict[str, Any] | None = None) -> Welcome:
        """Connect to the controller and announce this role; `address` is where it serves others.

        Raises:
            WireError: no controller answered in time.
        """
        handlers = {**handlers, SHUTDOWN: self._on_shutdown}
        host = os.uname().nodename
        request = Register(self.name, self.replica, os.getpid(), self.run_dir.name, address, info or {}, host)
        deadline = time.monotonic() + FIND_TIMEOUT_S
        while True:
            where = await self._find_controller(deadline)
            self._link = Client(where, self.token, handlers, name="controller", on_lost=self._on_lost)
            try:
                welcome = await self._link.call(REGISTER, request, timeout=5)
                break
            except WireError:
                # The file may be a former controller's: look again.
                self._link.close()
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
        self.doing = "ready"
        self._heartbeat = asyncio.create_task(self._beat())
        return welcome

    async def until_stopped(self) -> None:
        await self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()

    async def _find_controller(self, deadline: float) -> str:
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                address = self.run_dir.socket.read_text().strip()
                if address:
                    return address
            await asyncio.sleep(0.02)
        raise WireError(f"no controller in {self.run_dir.path} after {FIND_TIMEOUT_S:g} s")

    async def _beat(self) -> None:
        while True:
            self.link.notify(STATUS, RoleStatus(self.name, self.replica, self.busy, self.doing, self.gauges))
            await asyncio.sleep(1)

    def _on_shutdown(self, peer: object, request: object) -> object:
        asyncio.get_running_loop().call_soon(self.stop)
        return NOTHING

    def _on_lost(self) -> None:
        if not self._stopped.is_set() and self.doing != "starting":
            log.error("the controller is gone: %s ends", self.name)
            sys.stderr.flush()
            os._exit(1)

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._link is not None:
            self._link.close()


def main(name: str, serve: Callable[[RoleProcess], Awaitable[None]], run_dir: str, replica: int = 0) -> None:
    """Run a role to its end and exit the process."""
    process.run(name, lambda: asyncio.run(_run(name, serve, RunDir(run_dir), replica)))


async def _run(name: str, serve: Callable[[RoleProcess], Awaitable[None]], run_dir: RunDir, replica: int) -> int:
    role = RoleProcess(name, run_dir, replica)
    faults.install(name, replica, seed=role.config.seed, plan=role.config.faults)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, role.stop)
    try:
        await serve(role)
    finally:
        role.close()
    return 0
