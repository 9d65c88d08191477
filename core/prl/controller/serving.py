"""The controller of `prl serve`: engines alone, with the model that they started with.

There is no loop: it registers the engines, says in status.json where each of them answers, and ends them when it is
asked to. What a launcher restarts registers again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Any

from prl import faults, process
from prl.config.load import read_resolved
from prl.config.schema import RunConfig
from prl.controller.control import silent_roles
from prl.controller.hub import Connection, Hub
from prl.controller.run import START_TIMEOUT_S
from prl.controller.silence import end_silent_roles
from prl.errors import PrlError, RunFailed, StoreError
from prl.messages import CONTROL, NOTHING, SHUTDOWN, ControlReply, ControlRequest
from prl.plan import ENGINE
from prl.rundir import RunDir
from prl.store.files import atomic_write
from prl.store.writer import StoreWriter
from prl.wire import Peer

log = logging.getLogger(__name__)

PERIOD_S = 0.5


class Serving:
    """One `prl serve`, from its start to its exit code."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.config = read_resolved(run_dir.config, RunConfig)
        self.store = StoreWriter(run_dir, rollouts=False)
        self.hub = Hub(run_dir.token.read_text().strip(), run_dir.name, 0, 0, {CONTROL: self._asked})
        self.hub.on_joined.append(self._joined)
        self.hub.on_left.append(self._left)
        self._started = time.time()
        self._ready = False
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until it is asked to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        atomic_write(self.run_dir.socket, self.hub.server.start().encode())
        guards = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(end_silent_roles(self.hub, self.store, self.config.loop.silent_after_s)),
        ]
        error: PrlError | None = None
        try:
            await self.hub.wait_for(ENGINE, self.config.engine.replicas, START_TIMEOUT_S)
            self._ready = True
            await self._stop.wait()
        except PrlError as failure:
            error = None if self._stop.is_set() else failure
        finally:
            for guard in guards:
                guard.cancel()
            await self._end(error)
        return error.exit_code if error is not None else 0

    def stop(self) -> None:
        self._stop.set()
        self.hub.abort("stopped before its engines had started")

    def _asked(self, peer: Peer, request: ControlRequest) -> ControlReply:
        if request.action == "why-stuck":
            return ControlReply(True, "\n".join(self._waits()), {"waits": self._waits(), "roles": self._roles()})
        if request.action == "stop":
            self.stop()
            return ControlReply(True, "stopping: the engines end")
        name = self.run_dir.name
        return ControlReply(
            False,
            f"{name!r} only serves a model and cannot {request.action}: `prl stop {name}` ends it, `prl serve` "
            "starts it with other options",
        )

    def _waits(self) -> list[str]:
        missing = self.config.engine.replicas - len(self.hub.of(ENGINE))
        again = " again" if self._ready else ""
        lines = [f"{missing} of {self.config.engine.replicas} engines must register{again}"] if missing > 0 else []
        return lines + silent_roles(self.hub)

    # --- what it says of itself -----------------------------------------------------------------------------

    def _joined(self, connection: Connection) -> None:
        self.store.event("engine_serves", engine=connection.label, **connection.info)

    def _left(self, connection: Connection, why: str) -> None:
        self.store.event("role_lost", role=connection.role, replica=connection.replica, why=why)

    async def _tick(self) -> None:
        while True:
            try:
                self.store.status(self._status("running" if self._ready else "starting"))
            except StoreError as error:  # a full disk is no reason to stop serving
                log.error("%s", error)
                return
            await asyncio.sleep(PERIOD_S)

    def _status(self, state: str) -> dict[str, Any]:
        return {
            "kind": "serve",
            "state": state,
            "time": time.time(),
            "started": self._started,
            "waiting_for": "; ".join(self._waits()),
            "roles": self._roles(),
        }

    def _roles(self) -> dict[str, Any]:
        return {
            c.label: {"pid": c.pid, "doing": c.doing, "info": c.info, "gauges": c.gauges}
            for c in self.hub.connections.values()
        }

    async def _end(self, error: PrlError | None) -> None:
        self.hub.needed = False
        document = self._status("stopped" if error is None else "failed")
        summary: dict[str, Any] = {"kind": "serve", "outcome": document["state"], "reason": None}
        if error is not None:
            log.error("%s", error)
            summary["reason"] = document["failed_reason"] = str(error)
            document["log"] = (error.log if isinstance(error, RunFailed) else None) or "logs/controller-0.log"
        try:
            self.store.status(document)
            self.store.summary({**summary, "seconds": round(time.time() - self._started, 3)})
        except StoreError as failure:
            log.error("%s", failure)
        calls = [connection.peer.call(SHUTDOWN, NOTHING, timeout=2.0) for connection in self.hub.connections.values()]
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.to_thread(self.store.close)


async def _serve(run_dir: RunDir) -> int:
    serving = Serving(run_dir)
    faults.install("controller", seed=serving.config.seed, plan=serving.config.faults)
    return await serving.run()


def main(run_dir: str) -> None:
    """Serve and exit the process."""
    process.run("controller", lambda: asyncio.run(_serve(RunDir(run_dir))))


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
