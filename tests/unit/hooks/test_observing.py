"""What the loop reports reaches hook packages and monitors, and the run directory as ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prl import registry
from prl.config.schema import EnvTable, ModelTable, MonitorTable, RunConfig
from prl.contribution import Contribution
from prl.controller.observing import ObservedSink
from prl.rundir import RunDir
from prl.store.writer import StoreWriter

SEEN: list[Any] = []


class Recorder:
    """A monitor. It also raises when it is told of step 3, after which it hears nothing."""

    def start(self, config: Any, run_dir: Any) -> None:
        SEEN.append(("start", run_dir.name))

    def metrics(self, step: int, values: Any) -> None:
        if step == 3:
            raise ValueError("three")
        SEEN.append((step, dict(values)))

    def finish(self, outcome: str) -> None:
        SEEN.append(outcome)


def build(config: Any) -> Recorder:
    return Recorder()


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObservedSink]:
    monkeypatch.setenv("PRL_LOAD_PLUGINS", "")
    SEEN.clear()
    monkeypatch.setitem(sys.modules, "recorder_plugin", SimpleNamespace(build=build))
    config = RunConfig(
        model=ModelTable(path="org/model"), envs=[EnvTable(use="hello")], monitors=[MonitorTable(use="recorder")]
    )
    writer = StoreWriter(RunDir(tmp_path / "run"))
    with registry.override("monitors", "recorder", Contribution("recorder_plugin:build")):
        yield ObservedSink(writer, config, RunDir(tmp_path / "run"))
    writer.close()


def test_a_monitor_hears_of_the_run(sink: ObservedSink, tmp_path: Path) -> None:
    sink.started(None)
    sink.metrics(1, {"reward/mean": 0.5})
    sink.metrics(1, {"eval/hello/reward": 0.25})
    sink.event("weights_installed", version=1, seconds=0.5, bytes=10)
    sink.metrics(1, {"mismatch/probe_kl": 0.125})
    sink.finished("completed")
    lines = [(1, {"reward/mean": 0.5}), (1, {"eval/hello/reward": 0.25}), (1, {"mismatch/probe_kl": 0.125})]
    assert [("start", "run"), *lines, "completed"] == SEEN


def test_one_that_raises_is_muted_and_the_run_goes_on(
    sink: ObservedSink, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for step in range(1, 6):
        sink.metrics(step, {"reward/mean": 0.5})
    sink.finished("completed")
    assert SEEN == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5})]
    assert "monitor recorder failed in prl_step_finished and is muted: ValueError: three" in caplog.text
    assert sink.last == {"reward/mean": 0.5}


def test_every_event_becomes_its_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_LOAD_PLUGINS", "")
    told: list[tuple[str, dict[str, Any]]] = []
    run_dir = RunDir(tmp_path / "run")
    writer = StoreWriter(run_dir)
    sink = ObservedSink(writer, RunConfig(model=ModelTable(path="a/b"), envs=[EnvTable(use="hello")]), run_dir)
    assert sink._observers is None, "without observers there is no thread"
    monkeypatch.setattr(sink, "_tell", lambda hook, **arguments: told.append((hook, arguments)))
    sink.started(4)
    sink.event("weights_installed", version=5, seconds=0.5, bytes=10)
    monkeypatch.setattr(sink, "gauges", lambda: {"engine/serving": 1.0})
    sink.metrics(5, {"mismatch/probe_kl": 0.125})
    sink.metrics(6, {"mismatch/kl": 0.25})
    sink.event("checkpoint_saved", step=5)
    sink.event("stop_requested")
    for replica, leaving in ((1, False), (2, True)):  # the second was asked to go: that is no loss
        connection = SimpleNamespace(role="engine", replica=replica, leaving=leaving)
        sink.role_lost(connection, "it did not answer")  # type: ignore[arg-type]
    writer.close()
    assert told == [
        ("prl_run_started", {"resumed_from": 4}),
        ("prl_weights_published", {"version": 5, "seconds": 0.5, "num_bytes": 10}),
        ("prl_probes_scored", {"step": 5, "metrics": {"mismatch/probe_kl": 0.125}}),
        ("prl_step_finished", {"step": 6, "metrics": {"mismatch/kl": 0.25, "engine/serving": 1.0}}),
        ("prl_checkpoint_saved", {"step": 5, "path": run_dir.checkpoint(5)}),
        ("prl_role_lost", {"role": "engine", "replica": 1, "reason": "it did not answer"}),
    ]
