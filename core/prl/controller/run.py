"""The controller's process from start to exit code: start or resume, loop, checkpoints, summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from prl import faults, process
from prl.config.load import read_resolved
from prl.config.schema import RunConfig
from prl.controller.clients import WireRunner, WireTrainer
from prl.controller.control import Control
from prl.controller.fleet import WireFleet
from prl.controller.gauges import EngineMetrics
from prl.controller.health import end_unhealthy_engines
from prl.controller.hub import Connection, Hub
from prl.controller.observing import ObservedSink
from prl.controller.report import Report
from prl.controller.scaling import Scaler
from prl.controller.silence import end_silent_roles
from prl.errors import PrlError, StoreError
from prl.loop import snapshot
from prl.loop.evaluate import is_evaluated_on_resume
from prl.loop.state import LoopState, Roles
from prl.loop.supervisor import Loop
from prl.loop.tasks import TaskSource
from prl.loop.waits import Signal, within
from prl.messages import CONTROL, NOTHING, SHUTDOWN
from prl.planning import env_role
from prl.rundir import RunDir
from prl.store.checkpoints import Checkpoints
from prl.store.files import atomic_write
from prl.store.rewind import repair, rewind
from prl.store.writer import StoreWriter

log = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
"""How long a role may take to register: a large model is read from a cold disk in minutes."""


class Controller:
    """One run, or the continuation of one."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.config = read_resolved(run_dir.config, RunConfig)
        self.token = run_dir.token.read_text().strip()
        self.checkpoints = Checkpoints(run_dir)
        self.resumed, self.warnings = self.checkpoints.latest()
        self.incarnation = self.resumed.manifest.facts["incarnation"] + 1 if self.resumed else 0
        # What was written after the checkpoint is done again; without one, everything is.
        self.warnings += repair(run_dir)
        for warning in self.warnings:
            log.warning("%s", warning)
        if self.resumed is None:
            rewind(run_dir, -1)
        else:
            again = is_evaluated_on_resume(self.config, self.resumed.step)
            rewind(run_dir, self.resumed.step, evaluated_again=again, settled=snapshot.settled(self._own_part()))
        self.store = StoreWriter(
            run_dir,
            queue=self.config.store.queue,
            rollouts=self.config.store.rollouts == "all",
            every=self.config.store.every,
        )
        self.sink = ObservedSink(self.store, self.config, run_dir)
        engine = self.config.engine
        self.control = Control()
        self.scaler = self.control.scaler = Scaler(self.sink, engine.replicas, engine.drain_timeout_s)
        handlers = {CONTROL: self.control.handle, **self.scaler.handlers()}
        self.hub = self.control.hub = Hub(self.token, run_dir.name, self.incarnation, self.start_step, handlers)
        self.scaler.attach(self.hub)
        self.hub.on_left.append(self.sink.role_lost)
        self.report = Report(self.config, self.store, self.sink, self.hub, self.control, self.warnings, self.start_step)
        self.signal_received = False

    @property
    def start_step(self) -> int:
        return self.resumed.step if self.resumed else 0

    async def run(self) -> int:
        """Run to the end and return the exit code."""
        self._catch_signals()
        address = self.hub.server.start()
        atomic_write(self.run_dir.socket, address.encode())
        ticker = asyncio.create_task(self.report.tick())
        outcome = "failed"
        error: Exception | None = None
        try:
            await self._run_loop()
            outcome = "stopped" if self.control.stop_requested else "completed"
        except PrlError as failure:
            if self.control.stop_requested and self.control.state is None:
                outcome = "stopped"  # while it started: there is nothing to save
            else:
                error = failure
                log.error("the run failed: %s", failure)
        except Exception as failure:
            error = failure
            log.exception("the run failed")
        finally:
            ticker.cancel()
            await self._end(outcome, error)
        if error is not None:
            return error.exit_code if isinstance(error, PrlError) else 1
        return 75 if self.signal_received else 0

    async def _run_loop(self) -> None:
        trainers = await self._await_roles("trainer", self.config.trainer.processes)
        gateways = await self._await_roles("gateway", 1)
        await self._await_roles("engine", self.config.engine.replicas)
        for env in self.config.envs:
            await self._await_roles(env_role(env.label), 1)
        runner = WireRunner(self.hub)
        changes = Signal()
        fleet = self._fleet(changes)
        state = LoopState(
            config=self.config,
            roles=Roles(runner, WireTrainer(trainers), fleet, gateways[0].address, self.token),
            algorithm=self.config.algorithm.build(),
            tasks=TaskSource(runner, {env.label: env.weight for env in self.config.envs}, self.config.seed),
            sink=self.sink,
            run_id=self.run_dir.name,
            incarnation=self.incarnation,
            signal=changes,
        )
        self.hub.on_joined.append(lambda connection: self._gateway_moved(state, connection))
        loop = self._restore(state)
        self.control.state = state
        self.scaler.begin(fleet)
        self.sink.gauges = EngineMetrics(fleet, lambda: self.scaler.wanted).values
        self.report.begin(state, loop)
        self.sink.started(self.resumed.step if self.resumed else None)
        state.stopping = self.control.stop_requested
        limit = self.config.loop.silent_after_s
        guards = [
            asyncio.create_task(end_silent_roles(self.hub, self.sink, limit)),
            asyncio.create_task(
                end_unhealthy_engines(fleet, limit, lambda engine, why: self._end_engine(engine.connection, why))
            ),
        ]
        try:
            await loop.run()
        finally:
            for guard in guards:
                guard.cancel()
            await self.scaler.close()
            await fleet.close()

    def _fleet(self, changes: Signal) -> WireFleet:
        engine = self.config.engine
        return WireFleet(
            self.hub,
            engine.build(),
            self.token,
            changes.notify,
            end=self._end_engine,
            install_timeout_s=engine.install_timeout_s,
        )

    def _end_engine(self, connection: Connection, why: str) -> None:
        self.sink.event("engine_unfit", replica=connection.replica, reason=why)
        self.hub.end(connection, f"{why}; it is killed")

    async def _await_roles(self, role: str, replicas: int) -> list[Connection]:
        self.control.starting = f"waiting for {role} to register"
        return await self.hub.wait_for(role, replicas, START_TIMEOUT_S)

    def _restore(self, state: LoopState) -> Loop:
        """A fresh loop, or one that continues from the last complete checkpoint."""
        if self.resumed is None:
            return Loop(state, self._save)
        taken = snapshot.restore(state, self._own_part())
        self.sink.event("resumed", step=taken.step, incarnation=self.incarnation, warnings=self.warnings)
        log.info("resumed at step %d (incarnation %d)", taken.step, self.incarnation)
        return Loop(state, self._save, eval_first=taken.eval_first, eval_last=taken.eval_last)

    def _own_part(self) -> bytes:
        assert self.resumed is not None
        return (self.resumed.part("controller") / snapshot.FILE).read_bytes()

    def _gateway_moved(self, state: LoopState, connection: Connection) -> None:
        if connection.role == "gateway":
            state.roles.gateway = connection.address

    async def _save(self, step: int, data: bytes) -> None:
        """Both parts, then the manifest: without it there is no checkpoint. Training goes on meanwhile.

        Raises:
            StoreError, RunFailed: the disk is full, or the trainer did not save its part. Earlier checkpoints are
                untouched.
        """
        state = self.control.state
        assert state is not None
        timeout = self.config.loop.step_timeout_s
        started = time.monotonic()
        with state.waits.on("save", "trainer", f"writing the checkpoint of step {step}", timeout):
            draft = await asyncio.to_thread(self.checkpoints.begin, step)
            try:
                saving = state.roles.trainer.checkpoint(step, draft / "trainer")
                trainer = await within(saving, timeout, f"saving the checkpoint of step {step}", "trainer")
            except BaseException:
                self.checkpoints.abandon(step)  # where the disk is full, the last files need its room
                raise
            await asyncio.to_thread(self._commit, step, data, trainer)
        self.control.checkpointed = step
        self.sink.event("checkpoint_saved", step=step, seconds=round(time.monotonic() - started, 3))

    def _commit(self, step: int, data: bytes, trainer: dict[str, str]) -> None:
        # A resumed run repeats nothing before the checkpoint, so all of it must be in the files. What later steps have
        # added meanwhile is repeated, and removed by `rewind`.
        self.store.flush()
        own = self.checkpoints.write_part(step, "controller", {snapshot.FILE: data})
        facts = {"run_id": self.run_dir.name, "incarnation": self.incarnation}
        self.checkpoints.commit(step, {"trainer": trainer, "controller": own}, facts)
        self.checkpoints.prune(self.config.checkpoint.keep)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self.signal_received = True
        log.info("asked to stop: finishing the step in progress")
        self.control.stop()

    async def _end(self, outcome: str, error: Exception | None) -> None:
        """Tell every role to stop and write the last files, whatever happened."""
        self.hub.needed = False
        try:
            self.report.end(outcome, error)
        except StoreError as failure:
            log.error("%s", failure)
        calls = [connection.peer.call(SHUTDOWN, NOTHING, timeout=2.0) for connection in self.hub.connections.values()]
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.to_thread(self.sink.finished, outcome)
        await asyncio.to_thread(self.store.close)


def main(run_dir: str) -> None:
    """Run the controller and exit the process with the run's exit code."""

    def body() -> int:
        controller = Controller(RunDir(run_dir))
        faults.install("controller", seed=controller.config.seed, plan=controller.config.faults)
        return asyncio.run(controller.run())

    process.run("controller", body)
