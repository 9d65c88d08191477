"""T12 with the real roles: what goes wrong on the way of weights from the trainer to the engine, in whole runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 240

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained model of the reverse_text example."""
    folder = tmp_path_factory.mktemp("model")
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "examples" / "reverse_text" / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.save_tokenizer(folder)
    prepare.save_model(folder, 0)
    return folder


def run(folder: Path, model: Path, *faults: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    """A short run with `faults`; its exit code, summary, and everything the roles and the command said."""
    lines = [
        'name = "run"',
        f"[model]\npath = {json.dumps(str(model))}",
        "[loop]\nsteps = 6\ngroups_per_step = 4\ngroup_size = 4\nmax_staleness = 2",
        "[sampling]\nmax_tokens = 6",
        '[[envs]]\nuse = "reverse_text"\npartial = "position"',
        "[engine]\nthreads = 1\nslots = 16",
        "[trainer]\nthreads = 1\nlr = 1e-4",
        "[eval]\ntasks = 0",
        *(
            "\n".join(["[[faults]]", *(f"{key} = {json.dumps(value)}" for key, value in fault.items())])
            for fault in faults
        ),
    ]
    (folder / "run.toml").write_text("\n".join(lines))
    command = [sys.executable, "-m", "prl_cli", "run", "run.toml"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    summary = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    logs = "".join(path.read_text() for path in sorted((folder / "runs" / "run" / "logs").iterdir()))
    return done.returncode, summary, done.stdout + done.stderr + logs


def adds_up(rollouts: dict[str, Any]) -> bool:
    ended = rollouts["trained"] + sum(rollouts["dropped"].values()) + sum(rollouts["failed"].values())
    return bool(rollouts["dispatched"] == ended + rollouts["pending"])


def test_an_engine_that_fails_and_then_dies_during_an_install_serves_the_run_to_its_end(
    tmp_path: Path, model: Path
) -> None:
    code, summary, said = run(
        tmp_path,
        model,
        {"role": "engine", "point": "channel.receive", "action": "error", "at": 2},
        {"role": "engine", "point": "engine.install", "action": "error", "at": 3},
        {"role": "engine", "point": "engine.install", "action": "kill", "at": 5},
    )
    assert code == 0, said[-3000:]
    assert summary["outcome"] == "completed" and summary["steps"] == 6
    assert "fault injection failed channel.receive; trying again" in said
    assert "fault injection failed engine.install" in said, "the swap was taken back and tried again"
    assert "engine-0: restart 1 of" in said
    assert adds_up(summary["rollouts"]), summary["rollouts"]
    assert summary["staleness"]["max"] <= 2
    left = sorted(path.name for path in (tmp_path / "runs" / "run" / "weights").iterdir())
    assert left == ["v_000006"], "every version but the last was released"


def test_a_full_disk_ends_the_run_with_its_reason(tmp_path: Path, model: Path) -> None:
    code, summary, said = run(
        tmp_path, model, {"role": "trainer", "point": "channel.send", "action": "disk_full", "at": 4}
    )
    assert code == 1, said[-3000:]
    assert summary["outcome"] == "failed"
    assert "No space left on device" in summary["reason"] and "v_000003" in summary["reason"]
    assert adds_up(summary["rollouts"]), summary["rollouts"]
    left = sorted(path.name for path in (tmp_path / "runs" / "run" / "weights").iterdir())
    assert left and not any(name.endswith(".tmp") for name in left), "the last good version, nothing half written"
