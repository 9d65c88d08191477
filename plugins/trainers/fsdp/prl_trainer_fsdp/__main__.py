"""The trainer's process: `python -m prl_trainer_fsdp RUN_DIR`, one per rank.

The event loop answers the controller; everything that computes runs in one other thread, in the order it was asked for,
and checkpoints are written by a third, while training goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from prl import role
from prl.messages import (
    CHECKPOINT,
    NOTHING,
    PUBLISH,
    RELEASE,
    SNAPSHOT,
    TRAIN,
    CheckpointReply,
    CheckpointRequest,
    Nothing,
    PublishRequest,
    ReleaseRequest,
    SnapshotRequest,
    TrainBatch,
    TrainReport,
    WeightsRef,
)
from prl.store.checkpoints import Checkpoints
from prl.wire import Handlers
from prl_trainer_fsdp.checkpoint import check
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.parallel.runtime import leave
from prl_trainer_fsdp.trainer import Trainer

R = TypeVar("R")

IDLE = "waiting for a batch"
LEAVE_S = 5.0


class Worker:
    """Runs the trainer's methods one after another in one thread, each only once the trainer is ready."""

    def __init__(self, process: role.RoleProcess) -> None:
        self._process = process
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Build the trainer, register, and load the checkpoint that the controller resumes from, if it does."""
        process = self._process
        await self._run("comparing the checkpoint with the model", check_resumable, process)
        self._trainer = await self._run("loading the model", Trainer, process.config, process.run_dir.weights)
        runtime = self._trainer.runtime
        info = {"device": str(runtime.device), "world": runtime.world, "row_rank": runtime.context_rank}
        welcome = await process.register(self._handlers(), info=info)
        self._trainer.incarnation = welcome.incarnation
        if welcome.version > 0:
            part = process.run_dir.checkpoint(welcome.version) / "trainer"
            await self._run("loading the checkpoint", self._trainer.load_checkpoint, part)
        self._ready.set()
        process.doing = IDLE

    async def end(self) -> None:
        """Leave the group, unless a step still goes on: it may wait for a rank that is dead."""
        if self._process.doing == IDLE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._run("ending", leave)

    def _handlers(self) -> Handlers:
        return {
            TRAIN: self._train,
            PUBLISH: self._publish,
            RELEASE: self._release,
            SNAPSHOT: self._snapshot,
            CHECKPOINT: self._checkpoint,
        }

    async def _train(self, _: Any, batch: TrainBatch) -> TrainReport:
        await self._ready.wait()
        return await self._run(f"training step {batch.step}", self._trainer.train, batch)

    async def _publish(self, _: Any, request: PublishRequest) -> WeightsRef:
        await self._ready.wait()
        return await self._run(f"publishing version {request.version}", self._trainer.publish, request.version)

    async def _release(self, _: Any, request: ReleaseRequest) -> Nothing:
        await self._ready.wait()
        await self._run("releasing old versions", self._trainer.release, request.versions)
        return NOTHING

    async def _snapshot(self, _: Any, request: SnapshotRequest) -> Nothing:
        await self._ready.wait()
        await self._run(f"the snapshot of step {request.step}", self._trainer.snapshot, request.step)
        return NOTHING

    async def _checkpoint(self, _: Any, request: CheckpointRequest) -> CheckpointReply:
        await self._ready.wait()
        loop = asyncio.get_running_loop()
        write = self._trainer.checkpoint
        return CheckpointReply(await loop.run_in_executor(self._writer, write, request.step, Path(request.path)))

    async def _run(self, doing: str, function: Callable[..., R], *arguments: Any) -> R:
        self._process.doing = doing
        started = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        finally:
            if self._ready.is_set():  # loading is no useful work of the run
                self._process.busy += time.monotonic() - started
            self._process.doing = IDLE


def check_resumable(process: role.RoleProcess) -> None:
    """Refuse a checkpoint of another model before memory is taken for this one. Which checkpoint the controller
    resumes from it has not said yet; all of them are of one model."""
    found, _ = Checkpoints(process.run_dir).latest(verify=False)
    if found is not None and found.step > 0:
        own = cast(FsdpConfig, process.config.trainer.plugin_config())
        check(process.config.model, own, found.part("trainer"))


async def serve(process: role.RoleProcess) -> None:
    worker = Worker(process)
    await worker.start()
    await process.until_stopped()
    await worker.end()


if __name__ == "__main__":
    role.main("trainer", serve, sys.argv[1], int(os.environ.get("RANK", "0")))
