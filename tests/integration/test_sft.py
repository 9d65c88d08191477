"""`prl sft` as a user runs it: the example learns, a run that is killed goes on to the same bits, bad data is told."""

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

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft"
PATIENCE_S = 240.0


def prl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prl_cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--out", "build/sft"]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S, check=True)
    (folder / "sft.toml").write_text((EXAMPLE / "sft.toml").read_text())
    return folder


def settings(name: str, steps: int, *more: str) -> list[str]:
    changes = [f"name={name}", f"data.steps={steps}", "data.epochs=0", "checkpoint.every=20", *more]
    return ["sft", "sft.toml", *(part for change in changes for part in ("--set", change))]


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_example_learns_and_its_model_speaks(folder: Path) -> None:
    """All 500 steps: the held-out loss falls from that of a guess to less than half a nat."""
    done = prl(folder, "sft", "sft.toml", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["eval_loss_first"] > 5 and told["eval_loss"] < 0.6 and told["epochs"] == 4
    found = metrics(folder, "sft")
    losses = [line["eval/loss"] for line in found if "eval/loss" in line]
    assert len(losses) == 6 and losses == sorted(losses, reverse=True)
    waited = sum(line["time/data"] for line in found[1:])
    assert waited < 0.1 * sum(line["time/step"] for line in found[1:])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/sft/model")
    model = AutoModelForCausalLM.from_pretrained(folder / "runs/sft/model")
    rows = [json.loads(line) for line in (folder / "build/sft/held_out.jsonl").read_text().splitlines()[:30:2]]
    exact = 0
    for question, answer in (row["messages"] for row in rows):
        prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_tensors="pt")
        said = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        exact += tokenizer.decode(said) == answer["content"] + "<|end|>"
    assert exact >= 6, f"{exact} of {len(rows)} held-out words in capitals, usually 10"


def test_a_run_that_is_killed_goes_on_to_the_same_weights(folder: Path) -> None:
    """SIGKILL to the trainer after its second checkpoint, with two processes that prepare its data."""
    assert prl(folder, *settings("whole", 60)).returncode == 0
    workers = ("data.workers=2", "data.prefetch=3")
    running = subprocess.Popen(
        [sys.executable, "-m", "prl_cli", *settings("killed", 60, *workers)],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    run = folder / "runs" / "killed"
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (run / "checkpoints/step_000040/MANIFEST.json").exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        trainer = json.loads((run / "status.json").read_text())["roles"]["trainer-0"]["pid"]
        os.kill(trainer, signal.SIGKILL)
        assert running.wait(PATIENCE_S) != 0
    finally:
        if running.poll() is None:
            running.kill()
            running.wait()
    done = prl(folder, *settings("killed", 60, *workers), "--resume")
    assert done.returncode == 0, done.stderr
    left, right = (folder / "runs" / name / "model" / "model.safetensors" for name in ("whole", "killed"))
    assert left.read_bytes() == right.read_bytes()
    kept = ("step", "train/loss", "eval/loss", "data/epoch")
    whole, killed = (
        [{key: line[key] for key in kept if key in line} for line in metrics(folder, name)]
        for name in ("whole", "killed")
    )
    assert whole == killed


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (["data.train=missing.jsonl"], "there is no file missing.jsonl"),
        (["data.train=broken.jsonl"], "broken.jsonl:2: it has 'text'; expected 'messages'"),
        (["trainer.row_tokens=16"], "tokens and a packed row holds 16"),
    ],
)
def test_bad_data_is_told_on_the_terminal(folder: Path, changes: list[str], what: str) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "broken.jsonl").write_text(json.dumps(good) + '\n{"text": "a"}\n')
    done = prl(folder, *settings("bad", 5, *changes), "--clean", "--yes")
    assert done.returncode == 2 and what in done.stderr, done.stderr
