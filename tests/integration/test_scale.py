"""Engines that come and go while a run goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest

from .harness import Project, Run, assert_adds_up, wait_until

pytestmark = pytest.mark.slow


def engines(run: Run) -> tuple[int, int, int]:
    """(wanted, registered, serving), as the last status says."""
    counts = run.status.get("engines", {})
    return counts.get("wanted", 0), counts.get("registered", 0), counts.get("serving", 0)


def test_more_and_fewer_engines_without_a_pause_or_a_lost_episode(project: Project) -> None:
    run = project.run(steps=100_000, staleness=4)
    slow = ("--set", "envs.0.seconds=0.05", "--set", "checkpoint.every=0", "--set", "eval.every=0")
    with run.going(*slow, "--set", "trainer.lr=1e-6") as process:
        run.wait_for_step(1, process)
        answer = json.loads(run.ask("scale", "engines=3", "--json").stdout)
        assert answer["ok"] and answer["data"]["wanted"] == 3, answer
        wait_until(lambda: engines(run) == (3, 3, 3), "three engines serve")
        before = run.trained_steps()
        run.wait_for_step(before + 2, process)
        assert run.kill("engine-2")
        wait_until(lambda: engines(run)[2] == 2, "one is gone")
        wait_until(lambda: engines(run) == (3, 3, 3), "it came back and serves again")
        assert "engines: 3 -> 1" in run.ask("scale", "engines=1").stdout
        wait_until(lambda: engines(run) == (1, 1, 1), "one engine is left")
        wait_until(lambda: not (run.dir.control / "pids" / "engine-1").exists(), "and its process")
        before = run.trained_steps()
        run.wait_for_step(before + 2, process)
        refused = run.ask("scale", "engines=0")
        assert refused.returncode == 2 and "at least 1" in refused.stderr
        assert run.ask("stop").returncode == 0
        assert process.wait(timeout=120) == 0, run.output()
    assert_adds_up(run.summary["rollouts"])
    assert run.summary["rollouts"]["failed"] == {}, "what a lost engine had is tried again"
    launcher = run.log("launcher-0")
    assert "engine-2: restart 1 of" in launcher and "engine-1: restart" not in launcher
    assert [row["wanted"] for row in run.events("scaled")] == [3, 1]
    assert max(row.get("engine/serving", 0) for row in run.metrics()) == 3


def test_an_engine_that_is_stopped_in_its_tracks_is_started_again(project: Project) -> None:
    run = project.run(steps=12, staleness=4)
    with run.going(
        "--set", "loop.silent_after_s=4", "--set", "engine.replicas=2", "--set", "envs.0.seconds=0.1"
    ) as process:
        run.wait_for_step(2, process)
        os.kill(run.pid("engine-1"), signal.SIGSTOP)
        assert process.wait(timeout=200) == 0, run.output()
    assert_adds_up(run.summary["rollouts"])
    assert run.summary["steps"] == 12
    gone = run.events("role_silent") + run.events("engine_unfit")
    assert gone and "engine-1" in run.log("controller-0")
    assert "was ended by the controller" in run.log("launcher-0")
