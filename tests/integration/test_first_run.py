"""What `prl init` promises, with every process of a real run: train, interrupt, resume, evaluate, export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SHORT = ("--set", "eval.tasks=16", "--set", "loop.groups_per_step=4", "--set", "trainer.decay_steps=1000")


def prl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prl_cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As after `prl init` and `python make_model.py`, whose model has hardly been trained."""
    folder = tmp_path_factory.mktemp("first")
    assert prl(folder, "init").returncode == 0
    script = folder / "make_model.py"
    few = script.read_text().replace(
        "TURNING_STEPS, MIXED_STEPS = 128, 100, 150, 150", "TURNING_STEPS, MIXED_STEPS = 8, 50, 1, 1"
    )
    assert few != script.read_text()
    script.write_text(few)
    subprocess.run([sys.executable, "make_model.py"], cwd=folder, capture_output=True, timeout=300, check=True)
    return folder


def summary(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return found


def test_a_run_from_start_to_export(folder: Path) -> None:
    done = prl(folder, "run", "prl.toml", "--set", "name=whole", "--set", "loop.steps=3", "--json", *SHORT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["outcome"], told["steps"], told["exit_code"]) == ("completed", 3, 0)
    assert {"eval_first", "eval_last", "tokens_trained", "staleness", "engine_busy"} <= told.keys()
    assert "step 3/3" in done.stderr
    assert prl(folder, "export", "whole", "exported").returncode == 0
    evaluated = prl(folder, "eval", "whole", "--tasks", "16", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["eval_first"] == told["eval_last"]


def test_an_interrupted_run_is_saved_and_goes_on(folder: Path) -> None:
    command = [sys.executable, "-m", "prl_cli", "run", "prl.toml", "--set", "name=long", *SHORT]
    run = subprocess.Popen(
        [*command, "--set", "loop.steps=100000"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        status = folder / "runs" / "long" / "status.json"
        deadline = time.monotonic() + 120
        while run.poll() is None and time.monotonic() < deadline:
            if status.exists() and json.loads(status.read_text()).get("step", 0) >= 2:
                break
            time.sleep(0.2)
        asked = json.loads(prl(folder, "why-stuck", "long", "--json").stdout)
        assert asked["ok"], asked
        refused = prl(folder, "run", "prl.toml", "--set", "name=long", "--resume")
        assert refused.returncode == 2
        os.kill(run.pid, signal.SIGINT)
        _, err = run.communicate(timeout=120)
    finally:
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert run.returncode == 75, err
    assert "--resume" in err
    reached = summary(folder, "long")["steps"]
    assert reached >= 2
    done = prl(
        folder, "run", "prl.toml", "--set", "name=long", "--set", f"loop.steps={reached + 1}", "--resume", *SHORT
    )
    assert done.returncode == 0, done.stderr
    assert summary(folder, "long")["steps"] == reached + 1


def test_a_trainer_that_cannot_start_ends_the_run_with_its_cause(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{}")
    done = prl(folder, "run", "prl.toml", "--set", "name=broken", "--set", "model.path=./empty", *SHORT)
    assert done.returncode == 1
    causes = [line for line in done.stderr.splitlines() if ".log" in line]
    assert len(causes) == 1, done.stderr
    assert "Traceback" not in done.stderr
