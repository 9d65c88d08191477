"""From what the loop reports to lifecycle hooks and monitors.

The sink stands where the loop already reports every step, evaluation and event, so the loop itself knows nothing of
observers. With no hook package installed and no monitor configured there is no thread and nothing is delivered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prl.config.schema import RunConfig
from prl.controller.hub import Connection
from prl.hooks import MonitorObserver, Observers, RunInfo, plugin_manager
from prl.rundir import RunDir
from prl.store.records import kind_of
from prl.store.sink import RunSink
from prl.store.writer import StoreWriter

log = logging.getLogger(__name__)


_HOOKS = {"step": "prl_step_finished", "evaluation": "prl_eval_finished", "probes": "prl_probes_scored"}


class ObservedSink(RunSink):
    """A `RunSink` that tells observers what it writes.

    Raises:
        PluginError, ConfigError: an installed hook package or a configured monitor cannot be used.
    """

    def __init__(self, writer: StoreWriter, config: RunConfig, run_dir: RunDir) -> None:
        super().__init__(writer)
        self._run_dir = run_dir
        monitors = [MonitorObserver(table.use, table.build()) for table in config.monitors]
        manager = plugin_manager(monitors)
        info = RunInfo(run_dir.name, run_dir.path, config)
        self.gauges: Callable[[], Mapping[str, float]] = dict
        """What is added to the metrics of every step: how loaded the engines are."""
        self._observers = Observers(info, manager=manager, report=log.warning) if manager.get_plugins() else None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        kind = kind_of(values)
        if kind == "step":
            values = {**values, **self.gauges()}
        super().metrics(step, values)
        self._tell(_HOOKS[kind], step=step, metrics=dict(values))

    def event(self, kind: str, **data: Any) -> None:
        super().event(kind, **data)
        if kind == "weights_installed":
            self._tell(
                "prl_weights_published", version=data["version"], seconds=data["seconds"], num_bytes=data["bytes"]
            )
        elif kind == "checkpoint_saved":
            self._tell("prl_checkpoint_saved", step=data["step"], path=self._run_dir.checkpoint(data["step"]))

    def started(self, resumed_from: int | None) -> None:
        self._tell("prl_run_started", resumed_from=resumed_from)

    def role_lost(self, connection: Connection, why: str) -> None:
        if not connection.leaving:
            self._tell("prl_role_lost", role=connection.role, replica=connection.replica, reason=why)

    def finished(self, outcome: str, timeout_s: float = 10.0) -> None:
        """The last event. Blocks until the observers have it, or until `timeout_s` is over."""
        if self._observers is None:
            return
        self._tell("prl_run_finished", outcome=outcome)
        if not self._observers.close(timeout_s):
            log.warning("observers had not finished after %g s", timeout_s)

    def _tell(self, hook: str, **arguments: Any) -> None:
        if self._observers is not None:
            self._observers.emit(hook, **arguments)
