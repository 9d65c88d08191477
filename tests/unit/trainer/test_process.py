"""The trainer's process: the contract of its client, and a controller that speaks to a real one."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from prl.messages import (
    CHECKPOINT,
    NOTHING,
    PUBLISH,
    REGISTER,
    RELEASE,
    SHUTDOWN,
    SNAPSHOT,
    STATUS,
    TRAIN,
    CheckpointRequest,
    PublishRequest,
    Register,
    ReleaseRequest,
    RoleStatus,
    SnapshotRequest,
    TrainBatch,
    TrainReport,
    WeightsRef,
    Welcome,
)
from prl.rundir import RunDir
from prl.testing.contracts.trainer import CHECKS, CLIENT_CHECKS
from prl.wire import Peer, Server
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.role import FsdpPlugin
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples


class Client:
    """A `TrainerClient` over a trainer in this process."""

    dp_size = 1

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        return self._trainer.train(batches[0])

    async def publish(self, version: int) -> WeightsRef:
        return self._trainer.publish(version)

    async def release(self, versions: Sequence[int]) -> None:
        self._trainer.release(versions)

    async def snapshot(self, step: int) -> None:
        self._trainer.snapshot(step)

    async def checkpoint(self, step: int, path: Path) -> dict[str, str]:
        return self._trainer.checkpoint(step, path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_plugin_contract(check: Callable[[Callable[[], FsdpPlugin]], None]) -> None:
    check(lambda: FsdpPlugin(FsdpConfig()))


@pytest.mark.parametrize("check", CLIENT_CHECKS, ids=lambda check: check.__name__)
def test_client_contract(check: Callable[[Client], Awaitable[None]], model: Path, tmp_path: Path) -> None:
    asyncio.run(check(Client(Trainer(run_config(model), tmp_path, CPU))))


def test_several_processes_are_ranks_of_one_group(model: Path) -> None:
    config = run_config(model, processes=3)
    command = FsdpPlugin(FsdpConfig()).role(config).command
    assert command[1:] == ("-m", "prl_trainer_fsdp.ranks", "3", "-m", "prl_trainer_fsdp", "{run_dir}")


def published(run: RunDir) -> list[str]:
    return [str(path) for path in run.weights.iterdir()]


class Controller:
    """The other end of the wire: waits for one trainer and counts its heartbeats."""

    def __init__(self, run: RunDir, incarnation: int, version: int) -> None:
        run.control.mkdir(parents=True)
        run.token.write_text("secret")
        self._welcome = Welcome(incarnation, version)
        self.server = Server("secret", {REGISTER: self._register, STATUS: self._status})
        run.socket.write_text(self.server.start())
        self.joined: asyncio.Future[tuple[Peer, Register]] = asyncio.get_running_loop().create_future()
        self.statuses: list[RoleStatus] = []

    def _register(self, peer: Peer, request: Register) -> Welcome:
        self.joined.set_result((peer, request))
        return self._welcome

    def _status(self, _: Peer, status: RoleStatus) -> object:
        self.statuses.append(status)
        return NOTHING


async def start_process(
    run: RunDir, model: Path, incarnation: int, version: int
) -> tuple[Controller, asyncio.subprocess.Process]:
    run.config.parent.mkdir(parents=True, exist_ok=True)
    run.config.write_text(run_config(model).model_dump_json())
    controller = Controller(run, incarnation, version)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prl_trainer_fsdp", str(run.path), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return controller, process


def test_a_real_process_from_start_to_shutdown(model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        run = RunDir(tmp_path / "run")
        controller, process = await start_process(run, model, 0, 0)
        try:
            peer, registered = await asyncio.wait_for(controller.joined, 120)
            assert (registered.role, registered.replica, registered.info["world"]) == ("trainer", 0, 1)
            first = await peer.call(PUBLISH, PublishRequest(0), timeout=60)
            report = await peer.call(TRAIN, batches(samples(0), 1)[0], timeout=60)
            second = await peer.call(PUBLISH, PublishRequest(1), timeout=60)
            assert (first.version, report.version, second.version) == (0, 1, 1)
            await peer.call(RELEASE, ReleaseRequest([0]), timeout=60)
            assert published(run) == [second.location]
            part = run.checkpoint(1) / "trainer"
            await peer.call(SNAPSHOT, SnapshotRequest(1), timeout=60)
            saved = await peer.call(CHECKPOINT, CheckpointRequest(1, str(part)), timeout=60)
            assert set(saved.files) == {file.name for file in part.iterdir()}
            await peer.call(SHUTDOWN, NOTHING, timeout=60)
            assert await asyncio.wait_for(process.wait(), 30) == 0
            assert controller.statuses[0].role == "trainer"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            controller.server.close()
        # Another process continues from the checkpoint, as the next incarnation.
        again = RunDir(tmp_path / "again")
        (again.checkpoints).mkdir(parents=True)
        run.checkpoint(1).rename(again.checkpoint(1))
        controller, process = await start_process(again, model, 1, 1)
        try:
            peer, _ = await asyncio.wait_for(controller.joined, 120)
            batch = batches(samples(1, 1), 2)[0]
            batch.incarnation = 1
            report = await peer.call(TRAIN, batch, timeout=60)
            assert (report.version, report.incarnation) == (2, 1)
            controller.server.close()  # the controller is gone: nothing outlives a run
            assert await asyncio.wait_for(process.wait(), 30) == 1
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(scenario())
