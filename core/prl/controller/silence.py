"""Environment workers and engines that have fallen silent.

An environment that blocks its event loop (a sleep, a lock, a native call that never returns) answers nothing any more
and cannot even be asked to stop; its process lives, so no launcher sees a failure. After `loop.silent_after_s` without
a heartbeat it is killed: the launcher starts it again, and what it was running is tried again. An engine may hang in
the same way; one that speaks and does not work is `health`'s matter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Protocol

from prl.controller.hub import Connection, Hub
from prl.plan import ENGINE
from prl.planning import ENV_PREFIX

log = logging.getLogger(__name__)


class EventSink(Protocol):
    """Where it is told."""

    def event(self, kind: str, **data: object) -> None: ...


CHECKS = 8
"""Looks within one limit: a silent role is killed at most an eighth of the limit late."""


async def end_silent_roles(hub: Hub, sink: EventSink, limit: float) -> None:
    """Kill workers and engines that were silent for `limit` seconds, for ever."""
    period = limit / CHECKS
    while True:
        before = time.monotonic()
        await asyncio.sleep(period)
        if time.monotonic() - before > 2 * period:
            continue  # this process was held up itself: what was sent to it meanwhile is not read yet
        for connection in list(hub.connections.values()):
            silent = time.monotonic() - connection.seen
            if silent > limit and (connection.role == ENGINE or connection.role.startswith(ENV_PREFIX)):
                _end(hub, sink, connection, silent)


def _end(hub: Hub, sink: EventSink, connection: Connection, silent: float) -> None:
    why = f"it was silent for {silent:.1f} s (limit loop.silent_after_s), doing {connection.doing!r}"
    if connection.role != ENGINE:
        why += ": something in the environment blocks its event loop"
    sink.event("role_silent", role=connection.role, replica=connection.replica, seconds=round(silent, 1))
    if connection.host == os.uname().nodename:
        why += "; it is killed"
    hub.end(connection, why)
