"""Hooks of installed packages: finding them, asking them about a configuration, and telling them about a run.

`Observers` stands between the event loop and what others wrote. `emit` puts the event into a bounded queue and returns
(about 5 us); one thread hands it to each plugin on its own, so that a slow one delays only the queue, a raising one is
reported once and muted, and what does not fit into the queue is counted and left out.

PRL_LOAD_PLUGINS names the hook packages to load, separated by commas; empty loads none. PRL_TRACE_HOOKS=1 prints every
call to stderr.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from prl import hookspecs
from prl.config.compose import Problem
from prl.errors import PluginBroken
from prl.hookspecs import PROJECT, RunInfo, hookimpl
from prl.rundir import RunDir

if TYPE_CHECKING:
    from prl.config.schema import Table
    from prl.protocols import Monitor

__all__ = ["GROUP", "MonitorObserver", "Observers", "RunInfo", "check_config", "hookimpl", "plugin_manager"]

GROUP = "prl.hooks"
LOAD_VARIABLE = "PRL_LOAD_PLUGINS"
TRACE_VARIABLE = "PRL_TRACE_HOOKS"
log = logging.getLogger(__name__)


def plugin_manager(plugins: Iterable[Any] = ()) -> pluggy.PluginManager:
    """Every installed hook package that PRL_LOAD_PLUGINS allows, and `plugins`.

    Raises:
        PluginBroken: one cannot be imported, or implements a hook that does not exist or takes other arguments.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    allowed = _allowed()
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if allowed is not None and point.name not in allowed:
            continue
        origin = f"{point.name} of {point.dist.name} {point.dist.version}" if point.dist else point.name
        with _blame(origin):
            manager.register(point.load(), name=point.name)
    for plugin in plugins:
        with _blame(_name(plugin)):
            manager.register(plugin, name=_name(plugin))
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(name for name in vars(hookspecs) if name.startswith("prl_"))
        raise PluginBroken(f"{error}; the hooks are {known}") from error
    if os.environ.get(TRACE_VARIABLE, "") not in ("", "0"):
        manager.add_hookcall_monitoring(_trace_before, lambda *_: None)
    return manager


def check_config(config: Table, manager: pluggy.PluginManager | None = None) -> list[Problem]:
    """What installed hooks find wrong with a configuration. One that raises is itself a problem."""
    manager = manager or plugin_manager()
    problems: list[Problem] = []
    for name, plugin in manager.list_name_plugin():
        caller = manager.subset_hook_caller(
            "prl_check_config", [other for other in manager.get_plugins() if other is not plugin]
        )
        try:
            for found in caller(config=config):
                problems.extend(_as_problem(item) for item in found or ())
        except Exception as error:
            problems.append(
                Problem("", f"the check of the hook package {name} failed: {type(error).__name__}: {error}")
            )
    return problems


class MonitorObserver:
    """A monitor plugin (`prl.protocols.Monitor`) as an observer, so that it is isolated like any other."""

    def __init__(self, name: str, monitor: Monitor) -> None:
        self.name = f"monitor {name}"
        self._monitor = monitor

    @hookimpl
    def prl_run_started(self, run: RunInfo) -> None:
        self._monitor.start(run.config, RunDir(run.directory))

    @hookimpl
    def prl_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._monitor.metrics(step, metrics)

    @hookimpl
    def prl_eval_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._monitor.metrics(step, metrics)

    @hookimpl
    def prl_probes_scored(self, step: int, metrics: Mapping[str, float]) -> None:
        self._monitor.metrics(step, metrics)

    @hookimpl
    def prl_run_finished(self, outcome: str) -> None:
        self._monitor.finish(outcome)


class Observers:
    """Delivery of lifecycle events to hook packages, off the event loop.

    Args:
        run: given to every hook as `run`.
        plugins: observers in addition to the installed ones, such as the run's monitors.
        report: called once, from the delivery thread, with a line for each observer that is muted.
        capacity: events that may wait.

    `dropped` counts events that found the queue full; `muted` names observers that raised.
    """

    def __init__(
        self,
        run: RunInfo,
        plugins: Iterable[Any] = (),
        *,
        report: Callable[[str], None] = log.warning,
        capacity: int = 1024,
        manager: pluggy.PluginManager | None = None,
    ) -> None:
        self.run = run
        self.dropped = 0
        self.muted: list[str] = []
        self._report = report
        self._manager = manager or plugin_manager(plugins)
        self._queue: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._deliver, name="prl-observers", daemon=True)
        self._thread.start()

    def emit(self, hook: str, **arguments: Any) -> None:
        """Queue an event and return at once. `hook` is a name in `prl.hookspecs`; `run` is added."""
        if not hasattr(self._manager.hook, hook):
            raise AttributeError(f"there is no hook {hook!r}")
        try:
            self._queue.put_nowait((hook, {"run": self.run, **arguments}))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 10.0) -> bool:
        """Deliver what waits, then end the thread. False: an observer did not return in time and is left behind."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        if self.dropped:
            self._report(f"observers were too slow: {self.dropped} events were not delivered")
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        while (event := self._queue.get()) is not None:
            hook, arguments = event
            for name, plugin in self._manager.list_name_plugin():
                if plugin is not None and name not in self.muted:
                    self._call(name, plugin, hook, arguments)

    def _call(self, name: str, plugin: Any, hook: str, arguments: dict[str, Any]) -> None:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        try:
            self._manager.subset_hook_caller(hook, others)(**arguments)
        except BaseException as error:  # a plugin's sys.exit must not end the thread
            self.muted.append(name)
            self._report(f"the observer {name} failed in {hook} and is muted: {type(error).__name__}: {error}")


def _allowed() -> set[str] | None:
    names = os.environ.get(LOAD_VARIABLE)
    return None if names is None else {name.strip() for name in names.split(",")}


@contextmanager
def _blame(origin: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PluginBroken(
            f"the hook package {origin} cannot be used: {type(error).__name__}: {error}; "
            f"uninstall it, or leave it out with {LOAD_VARIABLE}"
        ) from error


def _name(plugin: Any) -> str:
    return str(getattr(plugin, "name", None) or getattr(plugin, "__name__", None) or type(plugin).__name__)


def _as_problem(found: str | Problem) -> Problem:
    return found if isinstance(found, Problem) else Problem("", found)


def _trace_before(hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]) -> None:
    to = ", ".join(implementation.plugin_name for implementation in implementations) or "nobody"
    shown = ", ".join(f"{key}={value!r}"[:80] for key, value in arguments.items() if key != "run")
    print(f"prl hooks: {hook}({shown}) -> {to}", file=sys.stderr)
