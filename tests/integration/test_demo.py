"""`make demo` after the install: three seeds learn, in time, with every process of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "examples" / "reverse_text" / "demo.py"
LIMIT_S = 240.0
"""For warm-up and reinforcement learning on two cores, with preparation and evaluation in it here."""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(seed: int, tmp_path: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, str(DEMO), "--seed", str(seed), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    name = "reverse-text" + (f"-seed{seed}" if seed else "")
    summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    assert summary["outcome"] == "completed" and summary["steps"] == 80
    assert summary["eval_first"] <= 0.5 and summary["eval_last"] >= 0.9
    assert summary["staleness"]["max"] <= 4 and summary["staleness"]["mean"] > 0
    rollouts = summary["rollouts"]
    ends = [rollouts["trained"], *rollouts["dropped"].values(), *rollouts["failed"].values(), rollouts["pending"]]
    assert rollouts["dispatched"] == sum(ends) == 80 * 256
    assert "held-out texts reversed exactly" in done.stdout
    assert time.monotonic() - started < LIMIT_S
