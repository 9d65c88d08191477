"""Supervised runs: they learn, evaluate without a trace, and stopping and resuming changes nothing."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from prl.config.schema import SftConfig
from prl.errors import Preempted
from prl.planning import build_plan
from prl_trainer_fsdp.sft.run import SftRun, main

from .helpers import run_ranks
from .sft_helpers import TEMPLATE, conversations, events, metrics, save_all, turns, write_config, write_jsonl

WEIGHTS = "model/model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_all(tmp_path_factory.mktemp("sft"))


def stop_after(run: SftRun, step: int) -> None:
    """Train to a step, then be told to stop."""
    while run.learner.steps < step:
        run._one_step(run.learner.steps + 1)
    run.stop()
    with pytest.raises(Preempted, match=f"after step {step} of"):
        run.run()
    run.close("stopped", None)


def test_a_run_learns_and_its_model_loads(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = write_config(folder, tmp_path / "run", steps=25)
    assert main(str(run.path)) == 0
    found = metrics(run)
    assert [line["step"] for line in found] == list(range(26))
    assert found[-1]["train/loss"] < 0.5 * found[1]["train/loss"]
    assert found[-1]["train/loss"] == pytest.approx(found[-1]["loss/nll"], rel=1e-5)
    assert found[0]["eval/loss"] > 2 * found[-1]["eval/loss"]
    assert found[-1]["eval/perplexity"] == pytest.approx(math.exp(found[-1]["eval/loss"]))
    assert [line["data/epoch"] for line in found[1:3]] == [4 / 7, 8 / 7]
    assert [event["step"] for event in events(run, "epoch")][:3] == [2, 4, 6]
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "completed" and summary["steps"] == 25
    assert (summary["eval_loss_first"], summary["eval_loss"]) == (found[0]["eval/loss"], found[-1]["eval/loss"])
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000025"]
    AutoModelForCausalLM.from_pretrained(run.path / "model")
    assert AutoTokenizer.from_pretrained(run.path / "model").chat_template == TEMPLATE


def test_evaluating_changes_nothing(folder: Path, tmp_path: Path) -> None:
    often = write_config(folder, tmp_path / "often", eval_every=1)
    never = write_config(folder, tmp_path / "never", eval=[])
    assert (main(str(often.path)), main(str(never.path))) == (0, 0)
    assert len([line for line in metrics(often) if "eval/loss" in line]) == 7
    assert not any("eval/loss" in line for line in metrics(never))
    assert (often.path / WEIGHTS).read_bytes() == (never.path / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("after", "workers", "trainer"),
    [(1, 0, {}), (2, 0, {"optimizer": "muon"}), (3, 1, {}), (4, 0, {"lora": {"rank": 2}})],
)
def test_stopping_and_resuming_changes_nothing(
    folder: Path, tmp_path: Path, after: int, workers: int, trainer: dict[str, Any]
) -> None:
    """Of seven rows a step takes four: step 2 goes across the bound of an epoch, and so does what follows step 3."""
    whole = write_config(folder, tmp_path / "whole", trainer=trainer)
    assert main(str(whole.path)) == 0
    parts = write_config(folder, tmp_path / "parts", trainer=trainer, workers=workers, eval_at_start=False)
    stop_after(SftRun(parts), after)
    assert main(str(parts.path)) == 0
    assert metrics(parts) == metrics(whole)[1:]
    assert (parts.path / WEIGHTS).read_bytes() == (whole.path / WEIGHTS).read_bytes()
    assert [event["step"] for event in events(parts, "resumed")] == [after]
    told = json.loads(parts.summary.read_text())
    assert main(str(parts.path)) == 0, "nothing is left to do"
    again = json.loads(parts.summary.read_text())
    assert [again[key] for key in ("loss", "eval_loss", "steps")] == [
        told[key] for key in ("loss", "eval_loss", "steps")
    ]
    assert (told["resumed_at"], again["resumed_at"]) == (after, 6)


def test_several_ranks_train_the_same_and_take_over_what_one_began(folder: Path, tmp_path: Path) -> None:
    """Two shards, two ranks that share rows, and two shards that go on from the third step of one process."""
    alone, begun = write_config(folder, tmp_path / "alone"), write_config(folder, tmp_path / "shard-begun")
    assert main(str(alone.path)) == 0
    stop_after(SftRun(begun), 3)
    runs = [write_config(folder, tmp_path / name) for name in ("shard", "ulysses")]
    run_ranks(Path(__file__).with_name("sft_ranks.py"), 2, *(str(run.path) for run in (*runs, begun)))
    assert [event["step"] for event in events(begun, "resumed")] == [3]
    for run in runs:
        for found, expected in zip(metrics(run), metrics(alone), strict=True):
            assert found == pytest.approx(expected, rel=2e-5), (run.name, expected["step"])
    for found, expected in zip(metrics(begun)[3:], metrics(alone)[4:], strict=True):
        assert found == pytest.approx(expected, rel=2e-5), ("begun", expected["step"])


def test_epochs_end_with_the_rows_that_are_left(folder: Path, tmp_path: Path) -> None:
    run = write_config(folder, tmp_path / "run", epochs=2)
    assert main(str(run.path)) == 0
    found = metrics(run)[1:]
    assert [line["data/examples"] for line in found] == [4, 4, 4, 2]
    assert found[-1]["data/epoch"] == 2.0 == json.loads(run.summary.read_text())["epochs"]


def test_sigterm_is_exit_code_75(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_config(folder, tmp_path / "run")
    step = SftRun._one_step

    def interrupted(self: SftRun, number: int) -> None:
        step(self, number)
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SftRun, "_one_step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(str(run.path)) == 75
    finally:
        signal.signal(signal.SIGTERM, before)
    assert json.loads(run.summary.read_text())["outcome"] == "stopped"
    assert (run.checkpoint(2) / "MANIFEST.json").exists()


def test_what_is_left_out_is_counted(folder: Path, tmp_path: Path) -> None:
    rows = [*conversations(), "{", {"messages": turns("a" * 70, "b")}, {"messages": turns("a", "b" * 70)}]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    run = write_config(
        folder, tmp_path / "run", train=data, epochs=1, on_bad_row="skip", too_long="truncate", shuffle=False
    )
    assert main(str(run.path)) == 0
    summary = json.loads(run.summary.read_text())
    assert summary["left_out"] == {"bad_row": 1, "too_long": 1, "truncated": 1}
    assert [line["data/examples"] for line in metrics(run)[1:]] == [4, 3, 1]
    whats = [event["what"] for event in events(run, "row_left_out")]
    assert len(whats) == 2 and "data.jsonl:9: the example has" in whats[0]


def test_bad_data_is_found_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("prl_trainer_fsdp.sft.run.Learner", loaded)
    long = write_jsonl(tmp_path / "long.jsonl", [*conversations(), {"messages": turns("a" * 70, "b")}])
    for name, train, what in (
        ("missing", "/none.jsonl", "cannot be read"),
        ("broken", write_jsonl(tmp_path / "broken.jsonl", ["{"]), "broken.jsonl:1: it is no JSON"),
        ("long", long, "long.jsonl:8: the example has 77 tokens and a packed row holds 64"),
    ):
        caplog.clear()
        assert main(str(write_config(folder, tmp_path / name, train=train).path)) == 2
        assert what in caplog.text


def test_a_tokenizer_of_a_larger_vocabulary_is_found_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))
    (model / "model.safetensors").unlink()
    assert main(str(write_config(model, tmp_path / "run").path)) == 2
    assert re.search(r"train.jsonl:\d+: the tokenizer makes token \d+, but .* has vocab_size = 9", caplog.text)


def test_the_plan_is_the_trainer_alone(folder: Path, tmp_path: Path) -> None:
    run = write_config(folder, tmp_path / "run")
    plan = build_plan(SftConfig.model_validate_json(run.config.read_bytes()), run)
    assert [(role.name, role.purpose) for role in plan.roles] == [("trainer", "main")]
    assert plan.roles[0].command[1:] == ("-m", "prl_trainer_fsdp.sft", "{run_dir}")
