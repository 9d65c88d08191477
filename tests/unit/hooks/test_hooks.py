"""Hook packages: isolation, order, overflow, misspelt names, switches."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prl import hooks
from prl.config.compose import Problem
from prl.config.schema import EnvTable, ModelTable, RunConfig
from prl.errors import PluginBroken
from prl.hooks import MonitorObserver, Observers, RunInfo, hookimpl, plugin_manager

CONFIG = RunConfig(model=ModelTable(path="org/model"), envs=[EnvTable(use="hello")])
RUN = RunInfo("run", Path("runs/run"), CONFIG)


@pytest.fixture(autouse=True)
def no_installed_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_LOAD_PLUGINS", "")


class Good:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.threads: set[str] = set()

    @hookimpl
    def prl_step_finished(self, step: int) -> None:
        self.seen.append(step)
        self.threads.add(threading.current_thread().name)

    @hookimpl
    def prl_run_finished(self, run: RunInfo, outcome: str) -> None:
        self.seen.append((run.name, outcome))


class Bad:
    def __init__(self) -> None:
        self.calls = 0

    @hookimpl
    def prl_step_finished(self, step: int) -> None:
        self.calls += 1
        raise SystemExit("bad")


def test_a_raising_observer_is_reported_once_and_harms_no_other() -> None:
    good, bad, reports = Good(), Bad(), []
    observers = Observers(RUN, [bad, good], report=reports.append)
    for step in range(500):
        observers.emit("prl_step_finished", step=step, metrics={})
    observers.emit("prl_run_finished", outcome="finished")
    assert observers.close()
    assert good.seen == [*range(500), ("run", "finished")]
    assert good.threads == {"prl-observers"}
    assert bad.calls == 1
    assert reports == ["the observer Bad failed in prl_step_finished and is muted: SystemExit: bad"]
    assert observers.muted == ["Bad"]


def test_events_that_do_not_fit_are_counted_and_emit_never_waits() -> None:
    started, release, reports = threading.Event(), threading.Event(), []

    class Slow:
        @hookimpl
        def prl_step_finished(self, step: int) -> None:
            started.set()
            release.wait(10)

    observers = Observers(RUN, [Slow()], report=reports.append, capacity=2)
    observers.emit("prl_step_finished", step=0, metrics={})
    assert started.wait(10)
    for step in range(1, 6):
        observers.emit("prl_step_finished", step=step, metrics={})
    assert observers.dropped == 3
    release.set()
    assert observers.close()
    assert "3 events were not delivered" in reports[0]


def test_an_observer_that_hangs_is_left_behind() -> None:
    release = threading.Event()

    class Hanging:
        @hookimpl
        def prl_step_finished(self, step: int) -> None:
            release.wait(10)

    observers = Observers(RUN, [Hanging()])
    observers.emit("prl_step_finished", step=1, metrics={})
    assert observers.close(timeout_s=0.05) is False
    release.set()


def test_misspelt_hooks_and_arguments_are_errors() -> None:
    class Misspelt:
        @hookimpl
        def prl_step_finishd(self, step: int) -> None: ...

    class Argument:
        @hookimpl
        def prl_step_finished(self, stepp: int) -> None: ...

    with pytest.raises(PluginBroken, match="prl_step_finishd.*the hooks are prl_check_config"):
        plugin_manager([Misspelt()])
    with pytest.raises(PluginBroken, match="stepp"):
        plugin_manager([Argument()])
    observers = Observers(RUN)
    with pytest.raises(AttributeError, match="prl_nothing"):
        observers.emit("prl_nothing")
    observers.close()


def test_checks_of_all_packages_are_collected_and_a_raising_one_is_a_problem() -> None:
    class First:
        @hookimpl
        def prl_check_config(self, config: RunConfig) -> list[str]:
            return ["too early"]

    class Second:
        @hookimpl
        def prl_check_config(self, config: RunConfig) -> list[Problem]:
            return [Problem("loop.steps", "too many")]

    class Raises:
        @hookimpl
        def prl_check_config(self, config: RunConfig) -> None:
            raise ZeroDivisionError("oops")

    found = hooks.check_config(CONFIG, plugin_manager([First(), Raises(), Second()]))
    assert sorted(map(str, found)) == [
        "loop.steps: too many",
        "the check of the hook package Raises failed: ZeroDivisionError: oops",
        "too early",
    ]


def test_a_monitor_is_an_observer() -> None:
    calls: list[Any] = []

    class Monitor:
        def start(self, config: Any, run_dir: Any) -> None:
            calls.append(("start", config.model.path, run_dir.name))

        def metrics(self, step: int, values: Any) -> None:
            calls.append((step, dict(values)))

        def finish(self, outcome: str) -> None:
            calls.append(outcome)

    observers = Observers(RUN, [MonitorObserver("m", Monitor())])
    observers.emit("prl_run_started", resumed_from=None)
    observers.emit("prl_step_finished", step=1, metrics={"reward": 0.5})
    observers.emit("prl_eval_finished", step=1, metrics={"eval/reward": 0.75})
    observers.emit("prl_run_finished", outcome="finished")
    observers.close()
    assert calls == [("start", "org/model", "run"), (1, {"reward": 0.5}), (1, {"eval/reward": 0.75}), "finished"]


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "acme_hooks.py").write_text(text)
    info = tmp_path / "acme_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prl.hooks]\nacme = acme_hooks\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_hooks", raising=False)
    monkeypatch.delenv("PRL_LOAD_PLUGINS")


def test_installed_packages_and_their_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from prl.hooks import hookimpl\n@hookimpl\ndef prl_check_config(config):\n    return ['no']\n"
    install(tmp_path, monkeypatch, text)
    monkeypatch.setenv("PRL_TRACE_HOOKS", "1")
    assert [str(problem) for problem in hooks.check_config(CONFIG)] == ["no"]
    assert "prl hooks: prl_check_config(" in capsys.readouterr().err
    monkeypatch.setenv("PRL_LOAD_PLUGINS", "other")
    assert hooks.check_config(CONFIG) == []
    monkeypatch.setenv("PRL_LOAD_PLUGINS", "other, acme")
    assert len(hooks.check_config(CONFIG)) == 1


def test_a_broken_hook_package_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "import no_such_library_at_all")
    with pytest.raises(PluginBroken, match="acme of acme-hooks 1.0.*no_such_library_at_all.*PRL_LOAD_PLUGINS"):
        plugin_manager()
