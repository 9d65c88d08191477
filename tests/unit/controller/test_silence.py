"""Workers that do not speak any more: who is killed, and who is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from prl.controller import silence
from prl.controller.hub import Connection
from prl.controller.hub import Hub as Base
from prl.testing.fakes import FakeSink

LIMIT = 0.4


class Hub(Base):
    """One that no process has registered with."""

    def __init__(self, *connections: Connection) -> None:
        self.connections = {(c.role, c.replica): c for c in connections}
        self._ended = {}
        self.lost: list[tuple[str, str]] = []

    def lose(self, connection: Connection, why: str) -> None:
        del self.connections[connection.role, connection.replica]
        self.lost.append((connection.label, why))


def connection(role: str, pid: int, host: str = "") -> Connection:
    return Connection(role, 0, None, "", pid, {}, host or os.uname().nodename)  # type: ignore[arg-type]


def watch(hub: Hub, sink: FakeSink, during: Any) -> None:
    async def main() -> None:
        task = asyncio.create_task(silence.end_silent_roles(hub, sink, LIMIT))
        await during()
        task.cancel()

    asyncio.run(main())


def test_a_silent_worker_is_killed_and_nobody_else() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleeper) as silent, subprocess.Popen(sleeper) as other:
        try:
            speaking = connection("env-speaking", other.pid)
            hub = Hub(connection("env-silent", silent.pid), speaking, connection("trainer", other.pid))
            sink = FakeSink()

            async def during() -> None:
                while silent.poll() is None:
                    speaking.seen = time.monotonic()
                    await asyncio.sleep(0.02)

            watch(hub, sink, during)
            assert silent.returncode == -signal.SIGKILL
            assert other.poll() is None
            ((label, why),) = hub.lost
            assert label == "env-silent-0"
            assert "loop.silent_after_s" in why
            assert [kind for kind, _ in sink.events] == ["role_silent"]
        finally:
            silent.kill()
            other.kill()


def test_a_pid_of_another_machine_means_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    hub = Hub(connection("env-far", 1, host="far"))

    async def during() -> None:
        while not hub.lost:
            await asyncio.sleep(0.02)

    watch(hub, FakeSink(), during)
    assert killed == []


def test_a_controller_that_was_held_up_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    worker = connection("env-a", 1)
    hub = Hub(worker)

    async def during() -> None:
        await asyncio.sleep(0)
        hold_up()
        await asyncio.sleep(0.01)  # the watcher looks now; only then is the heartbeat read
        worker.seen = time.monotonic()
        await asyncio.sleep(LIMIT / 4)

    watch(hub, FakeSink(), during)
    assert hub.lost == []


def hold_up() -> None:
    time.sleep(1.5 * LIMIT)
