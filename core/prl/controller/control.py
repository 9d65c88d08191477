"""What may be asked of a running controller: pause, resume, checkpoint, evaluate, stop, scale, why-stuck."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prl.controller.hub import Hub
from prl.controller.scaling import Scaler
from prl.loop.state import LoopState
from prl.messages import ControlReply, ControlRequest
from prl.wire import Peer

SILENT_S = 10.0
"""A role that has not spoken for so long (ten heartbeats) is named in `why-stuck`."""


class Control:
    """Answers control requests; before the loop exists it can only say what the run waits for.

    `hub` and `scaler` are set before the first request: the hub itself is made with this object's handler.
    """

    hub: Hub
    scaler: Scaler

    def __init__(self) -> None:
        self.state: LoopState | None = None
        self.starting = "starting"
        self.checkpointed = -1
        self.stop_requested = False

    async def handle(self, peer: Peer, request: ControlRequest) -> ControlReply:
        if request.action == "why-stuck":
            return ControlReply(True, "\n".join(self.why()), self._roles())
        if request.action == "stop":
            self.stop()
            return ControlReply(True, "stopping: the step in progress is finished and saved")
        if self.state is None:
            return ControlReply(False, f"the run is still starting: {self.starting}")
        if request.action == "checkpoint":
            return await self._checkpoint(self.state)
        if request.action == "scale":
            return await self._scale(self.state, request.engines)
        return self._switch(self.state, request.action)

    def stop(self) -> None:
        """Finish the step in progress, save, end."""
        self.stop_requested = True
        if self.state is None:
            self.hub.abort("stopped before it had started")
        else:
            self.state.stopping = True
            self.state.sink.event("stop_requested")
            self.state.signal.notify()

    def why(self) -> list[str]:
        """The waits in progress, the oldest first, and roles that have fallen silent."""
        lines = [self.starting] if self.state is None else self.state.waits.describe()
        return lines + self.scaler.describe() + silent_roles(self.hub)

    def _switch(self, state: LoopState, action: str) -> ControlReply:
        if action == "evaluate":
            state.evaluate_requested = True
            message = "an evaluation starts"
        else:
            state.paused = "as asked for" if action == "pause" else ""
            message = "paused: episodes in flight finish, nothing new starts" if state.paused else "resumed"
        state.sink.event(action)
        state.signal.notify()
        return ControlReply(True, message)

    async def _checkpoint(self, state: LoopState) -> ControlReply:
        before, asked_at = self.checkpointed, state.version
        state.checkpoint_requested = True
        state.signal.notify()
        deadline = time.monotonic() + state.config.loop.step_timeout_s
        while self.checkpointed == before or self.checkpointed < asked_at:
            if time.monotonic() > deadline:
                return ControlReply(False, "no checkpoint was saved within loop.step_timeout_s")
            await asyncio.sleep(0.05)
        return ControlReply(True, f"saved step {self.checkpointed}", {"step": self.checkpointed})

    async def _scale(self, state: LoopState, engines: int) -> ControlReply:
        if state.stopping or state.done:
            return ControlReply(False, "the run is ending")
        return await self.scaler.scale(engines)

    def _roles(self) -> dict[str, Any]:
        roles = {
            c.label: {"pid": c.pid, "doing": c.doing, "busy": c.busy, "gauges": c.gauges}
            for c in self.hub.connections.values()
        }
        return {"roles": roles, "waits": self.why()}


def silent_roles(hub: Hub) -> list[str]:
    """A line for each role that has fallen silent."""
    lines = []
    for connection in hub.connections.values():
        silent = time.monotonic() - connection.seen
        if silent > SILENT_S:
            lines.append(
                f"{connection.label} (pid {connection.pid}) has not spoken for {silent:.0f} s; it was "
                f"{connection.doing!r}: see logs/{connection.label}.log"
            )
    return lines
