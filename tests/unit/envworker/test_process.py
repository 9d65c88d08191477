"""`python -m prl.envworker` as the launcher starts it, with this test as its controller and gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prl.config.schema import EnvTable, ModelTable, RunConfig
from prl.errors import WireError
from prl.messages import (
    LIST_TASKS,
    NOTHING,
    REGISTER,
    REPLY,
    RUN_EPISODE,
    SHUTDOWN,
    STATUS,
    EpisodeReply,
    EpisodeRequest,
    Register,
    ReplyRequest,
    RoleStatus,
    TaskPage,
    Welcome,
)
from prl.plan import Role
from prl.rundir import RunDir
from prl.types import Message, Sampling, Task, Turn
from prl.wire import Peer, Server
from prl_launchers.variables import environment

ENVIRONMENT = """
import os
from prl.env import SingleTurnEnv
from prl.types import Task

class MyEnv(SingleTurnEnv):
    def __init__(self, words: int = 2):
        print("building", words)
        self.words = words

    def tasks(self, split):
        return [Task(id=f"{split}-{i}", prompt="x" * i) for i in range(self.words)]

    def score(self, task, text):
        print("scoring", task.id)
        if text == "crash":
            os._exit(9)
        return {"reward": 1.0, "secret": float("HF_TOKEN" in os.environ)}
"""


class Controller:
    """What a worker needs of one, and of a gateway."""

    def __init__(self, run_dir: RunDir) -> None:
        self.registered: asyncio.Future[tuple[Peer, Register]] = asyncio.get_running_loop().create_future()
        self.status: list[RoleStatus] = []
        handlers = {REGISTER: self._register, STATUS: self._status, REPLY: self._reply}
        self.server = Server("t", handlers)
        self.address = self.server.start()
        run_dir.token.write_text("t")
        run_dir.socket.write_text(self.address)

    def _register(self, peer: Peer, request: Register) -> Welcome:
        self.registered.set_result((peer, request))
        return Welcome(0, 0)

    def _status(self, peer: Peer, request: RoleStatus) -> Any:
        self.status.append(request)
        return NOTHING

    def _reply(self, peer: Peer, request: ReplyRequest) -> Turn:
        return Turn(Message("assistant", request.messages[-1].content), "stop", 1, 1)

    def request(self, prompt: str) -> EpisodeRequest:
        task = Task("t", prompt)
        return EpisodeRequest(1, "MyEnv", task, 0, Sampling(), self.address, "1.key", 5.0)

    async def run(self, prompt: str) -> EpisodeReply:
        peer, _ = await self.registered
        return await peer.call(RUN_EPISODE, self.request(prompt), timeout=10)


def start(run_dir: RunDir) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "prl.envworker", str(run_dir.path), "MyEnv", "0"]
    variables = environment(Role("env-MyEnv", tuple(argv), clean_env=True), None, {**os.environ, "HF_TOKEN": "secret"})
    return subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.asynccontextmanager
async def worker(tmp_path: Path, **table: Any) -> AsyncIterator[tuple[Controller, subprocess.Popen[str]]]:
    run_dir = RunDir(tmp_path / "run")
    run_dir.control.mkdir(parents=True)
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    env = EnvTable(use=f"{tmp_path}/my_env.py:MyEnv", **table)
    run_dir.config.write_text(RunConfig(model=ModelTable(path="m"), envs=[env]).model_dump_json())
    controller = Controller(run_dir)
    process = start(run_dir)
    try:
        yield controller, process
    finally:
        controller.server.close()
        process.kill()
        process.communicate()


def test_a_file_is_served_and_shutdown_ends_it_cleanly(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path, words=3) as (controller, process):
            peer, registered = await asyncio.wait_for(controller.registered, 20)
            assert (registered.role, registered.info) == ("env-MyEnv", {"env": "MyEnv", "class": "MyEnv"})
            tasks = await peer.call(LIST_TASKS, TaskPage("MyEnv", "train", 0, 10), timeout=5)
            assert [task.id for task in tasks] == ["train-0", "train-1", "train-2"]
            reply = await controller.run("hello")
            assert reply.error is None
            assert reply.metrics == {"secret": 0.0}
            await peer.call(SHUTDOWN, NOTHING, timeout=5)
            out, err = await asyncio.to_thread(process.communicate, timeout=10)
            assert process.returncode == 0
            assert out == ""
            assert "building 3" in err
            assert "scoring t" in err
            assert controller.status

    asyncio.run(main())


def test_the_death_of_the_controller_ends_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path) as (controller, process):
            await asyncio.wait_for(controller.registered, 20)
            await controller.run("hello")
            controller.server.close()
            _, err = await asyncio.to_thread(process.communicate, timeout=5)
            assert process.returncode == 1
            assert "the controller is gone" in err

    asyncio.run(main())


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_worker_that_dies_answers_nobody_and_its_call_can_be_dropped(tmp_path: Path, how: str) -> None:
    """The wire's server cannot see a peer go: the launcher reports the death, and the hub drops the peer."""

    async def main() -> None:
        async with worker(tmp_path) as (controller, process):
            peer, _ = await asyncio.wait_for(controller.registered, 20)
            if how == "kill":
                process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(process.wait, 5)
            call = asyncio.ensure_future(controller.run("crash"))
            assert await asyncio.to_thread(process.wait, 10) == (9 if how == "exit" else -9)
            controller.server.drop(peer, "its process ended")
            with pytest.raises(WireError):
                await call

    asyncio.run(main())


def test_an_environment_that_cannot_be_built_ends_it_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with worker(tmp_path, word=3) as (_, process):
            _, err = await asyncio.to_thread(process.communicate, timeout=20)
            assert process.returncode == 2
            assert "word" in err
            assert "Traceback" not in err

    asyncio.run(main())
