"""Whole runs with a real vLLM: they learn as with the embedded engine, across swaps, with the same probabilities."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prl.store.reader import open_run
from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.interpreter import REMEDY, choose

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 300.0
STEPS = 30
WARM_UP = 260
"""Of the example's 400 steps: what is shown in the end is a third reversed texts, two thirds copies."""
MOST_KL = 1e-6
"""Of a float32 step: above rounding, far below what a wrong tensor, position or temperature would make."""

pytestmark = pytest.mark.skipif(choose(VllmConfig()) is None, reason=f"no vLLM here: {REMEDY}")

VLLM = """
[engine]
use = "vllm"
threads = 1
max_model_len = 64
max_num_seqs = 128
enforce_eager = true
env = { VLLM_CPU_KVCACHE_SPACE = "1" }
"""


def command(folder: Path, *arguments: str) -> None:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + logs(folder)


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("runs/*/logs/*.log")))


def prl(folder: Path, *arguments: str) -> None:
    command(folder, sys.executable, "-m", "prl_cli", *arguments)


def settings(**changes: Any) -> list[str]:
    return [part for key, value in changes.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reverse_text example's model was warmed up."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "vllm.toml").write_text(VLLM)
    command(folder, sys.executable, str(EXAMPLES / "reverse_text" / "prepare.py"))
    changes = settings(data__steps=WARM_UP, trainer__decay_steps=WARM_UP)
    prl(folder, "sft", str(EXAMPLES / "reverse_text" / "sft.toml"), *changes)
    return folder


def trained(folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Train for 30 steps. Returns the metrics of each, with what the engine found of its version's probes."""
    changes = settings(name=name, loop__steps=STEPS, trainer__decay_steps=STEPS, eval__tasks=0, loop__max_staleness=1)
    prl(folder, "run", str(EXAMPLES / "reverse_text" / "rl.toml"), *more, *changes)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    found = list(map(json.loads, lines))
    probed = {row["step"]: row for row in found if "mismatch/probe_kl" in row}
    rows = [{**probed.get(row["step"], {}), **row} for row in found if "time/step" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


def reward(rows: list[dict[str, Any]]) -> float:
    return statistics.fmean(row["reward/mean"] for row in rows)


def test_the_reward_rises_as_with_the_embedded_engine(folder: Path) -> None:
    embedded = trained(folder, "embedded")
    rows = trained(folder, "vllm", "vllm.toml")
    assert abs(reward(rows[:3]) - reward(embedded[:3])) < 0.1, "they begin with one policy"
    gained = reward(rows[-5:]) - reward(rows[:3])
    assert gained > 0.25
    assert abs(reward(rows[-5:]) - reward(embedded[-5:])) < 0.1

    kls = [row["mismatch/kl"] for row in rows if "mismatch/kl" in row]
    assert len(kls) > 5, "hardly a step had tokens of the trainer's own version"
    assert max(kls) < MOST_KL
    probes = {row["step"]: row["mismatch/probe_kl"] for row in rows if "mismatch/probe_kl" in row}
    assert len(probes) >= STEPS // 2 and STEPS in probes, "with a staleness of 1 at most every second is skipped"
    assert max(probes.values()) < MOST_KL

    stored = open_run(folder / "runs" / "vllm").rollouts().to_pylist()
    versions = [{v for v, was in zip(row["versions"], row["sampled"], strict=True) if was} for row in stored]
    assert sum(len(found) > 1 for found in versions) > 20, "hardly a sample crossed a swap of weights"
