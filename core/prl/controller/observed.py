"""The loop's reports, into the run directory and to the hooks and monitors that observe the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prl.config.schema import RunConfig
from prl.controller.hub import Connection
from prl.hooks import MonitorObserver, Observers, RunInfo
from prl.rundir import RunDir
from prl.store.sink import RunSink
from prl.store.writer import StoreWriter


class ObservedSink(RunSink):
    """A `RunSink` that also tells `prl.hooks` observers; they run on a thread of their own and cannot hold it up."""

    def __init__(self, writer: StoreWriter, config: RunConfig, run_dir: RunDir) -> None:
        super().__init__(writer)
        self._run_dir = run_dir
        monitors = [MonitorObserver(table.use, table.build("monitors")) for table in config.monitors]
        info = RunInfo(config.name, run_dir.name, run_dir.path, config)
        self._observers = Observers(info, monitors, report=lambda line: writer.event("observer_muted", message=line))

    def started(self, resumed_from: int | None) -> None:
        self._observers.emit("prl_run_started", resumed_from=resumed_from)

    def finished(self, outcome: str) -> None:
        self._observers.emit("prl_run_finished", outcome=outcome)
        self._observers.close()

    def role_lost(self, connection: Connection, why: str) -> None:
        self.event("role_lost", role=connection.role, replica=connection.replica, reason=why)
        self._observers.emit("prl_role_lost", role=connection.role, replica=connection.replica, reason=why)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        super().metrics(step, values)
        hook = "prl_eval_finished" if "eval/seconds" in values else "prl_step_finished"
        self._observers.emit(hook, step=step, metrics=dict(values))

    def weights_installed(self, version: int, seconds: float, num_bytes: int) -> None:
        super().weights_installed(version, seconds, num_bytes)
        self._observers.emit("prl_weights_published", version=version, seconds=seconds, num_bytes=num_bytes)

    def checkpoint_saved(self, step: int, path: Path) -> None:
        self.event("checkpoint_saved", step=step)
        self._observers.emit("prl_checkpoint_saved", step=step, path=path)
