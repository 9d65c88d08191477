"""Listing and showing runs, from files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prl.rundir import RunDir
from prl_cli import runs


def make(root: Path, name: str, **status: object) -> RunDir:
    run = RunDir(root / name)
    run.control.mkdir(parents=True)
    run.config.write_text("{}")
    if status:
        run.status.write_text(json.dumps(status))
    return run


@pytest.fixture
def root(project: Path) -> Path:
    return project / "runs"


def test_no_runs(project: Path, prl: Any) -> None:
    result = prl("runs")
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(prl("runs", "--json").stdout)["runs"] == []


def test_the_list_tells_state_and_result(root: Path, prl: Any) -> None:
    make(root, "done", state="completed", step=5, steps=5, reward=0.5, eval_last=0.9)
    make(root, "killed", state="running", step=2, steps=5)
    (root / "notes").mkdir()
    rows = {row["name"]: row for row in json.loads(prl("runs", "--json").stdout)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {"done": "completed", "killed": "dead"}
    assert "done    completed  5/5   0.500   0.900" in prl("runs").stdout


def test_a_held_run_is_alive_and_may_be_paused(root: Path, prl: Any) -> None:
    run = make(root, "going", state="running", step=2, steps=5, paused=True)
    with runs.held(run):
        row = json.loads(prl("runs", "list", "--json").stdout)["runs"][0]
    assert (row["alive"], row["state"]) == (True, "paused")


def test_show(root: Path, prl: Any) -> None:
    run = make(root, "done", state="failed", step=2, steps=5, failed_reason="disk full")
    run.logs.mkdir()
    (run.logs / "trainer-0.log").write_text("")
    run.checkpoint(2).mkdir(parents=True)
    (run.checkpoint(2) / "MANIFEST.json").write_text("{}")
    shown = prl("runs", "show", "done").stdout
    assert "failed at step 2/5" in shown
    assert "disk full" in shown
    answer = json.loads(prl("runs", "show", "done", "--json").stdout)
    assert (answer["checkpoints"], answer["logs"]) == ([2], ["trainer-0.log"])


def test_a_status_that_is_being_written_is_no_error(root: Path, prl: Any) -> None:
    make(root, "torn").status.write_text('{"state": "runn')
    assert prl("runs").exit_code == 0


def test_another_folder_of_runs(project: Path, prl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make(project / "elsewhere", "a", state="completed", step=1, steps=1)
    assert "a" in prl("runs", "--runs-dir", "elsewhere").stdout
    monkeypatch.setenv("PRL_RUNS_DIR", "elsewhere")
    assert "completed" in prl("runs").stdout
