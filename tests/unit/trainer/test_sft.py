"""Supervised runs: which tokens are trained, in which order, and that stopping and resuming changes nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from prl.config.schema import SftConfig
from prl.errors import ConfigError, Preempted
from prl.planning import build_plan
from prl.rundir import RunDir
from prl_trainer_fsdp import sft
from prl_trainer_fsdp.sft_data import Dataset, Renderer, order, packed_row

from .helpers import save_model

TEMPLATE = (
    "{%- for m in messages -%}"
    "{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
FORGETFUL = (
    "{%- for m in messages -%}"
    "{%- if m['role'] != 'assistant' or loop.last -%}{{- m['content'] + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of letters, newline and four special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz .\n"
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(SPECIAL)
    out = save_model(tmp_path_factory.mktemp("sft"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(out)
    return out


def trained_text(tokenizer: Any, example: dict[str, Any]) -> tuple[str, str]:
    renderer = Renderer(tokenizer)
    (encoded,) = renderer.encode([renderer.pieces(example)])
    chosen = [int(token) for token, trained in zip(encoded.token_ids, encoded.trained, strict=True) if trained]
    return "".join(tokenizer.convert_ids_to_tokens(encoded.token_ids.tolist())), "".join(
        tokenizer.convert_ids_to_tokens(chosen)
    )


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_assistant_turns_are_trained_with_their_end_and_no_further(folder: Path) -> None:
    tokenizer = sft.load_tokenizer(str(folder))
    whole, trained = trained_text(tokenizer, {"messages": turns("ab", "cd", "ef", "gh")})
    assert whole == "<|user|>ab<|end|>\n<|assistant|>cd<|end|>\n<|user|>ef<|end|>\n<|assistant|>gh<|end|>\n"
    assert trained == "cd<|end|>gh<|end|>"


def test_a_plain_completion_is_trained_with_the_end_of_sequence(folder: Path) -> None:
    tokenizer = sft.load_tokenizer(str(folder))
    assert trained_text(tokenizer, {"prompt": "abc", "completion": "de"}) == ("abcde<|end|>", "de<|end|>")
    assert trained_text(tokenizer, {"prompt": "", "completion": "de"})[1] == "e<|end|>", "nothing predicts the first"


def test_a_conversational_prompt_goes_through_the_template(folder: Path) -> None:
    example = {"prompt": turns("ab"), "completion": "cd"}
    assert trained_text(sft.load_tokenizer(str(folder)), example)[1] == "cd<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused(folder: Path) -> None:
    tokenizer = sft.load_tokenizer(str(folder))
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ConfigError, match="writes turn 2 differently"):
        Renderer(tokenizer).pieces({"messages": turns("ab", "cd", "ef", "gh")})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "data.jsonl:2"),
        ('{"text": "a"}', "data.jsonl:2.*expected"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "data.jsonl:2.*no token to train"),
        (json.dumps({"messages": turns("a" * 70, "b")}), "data.jsonl:2.*row holds 64"),
    ],
)
def test_a_wrong_line_is_named(folder: Path, tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": turns("a", "b")}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=what):
        Dataset(str(path), sft.load_tokenizer(str(folder)), 64).examples([0, 1])


def test_epochs_follow_one_another() -> None:
    assert [order(5, step, 4, 0, False) for step in (1, 2)] == [[0, 1, 2, 3], [4, 0, 1, 2]]
    shuffled = [index for step in range(1, 6) for index in order(5, step, 4, 7, True)]
    epochs = [shuffled[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert shuffled == [index for step in range(1, 6) for index in order(5, step, 4, 7, True)]


def test_a_row_of_nothing_is_empty() -> None:
    row = packed_row([])
    assert row.num_tokens == 0 and row.num_documents == 0


def write_config(folder: Path, at: Path, **data: Any) -> RunDir:
    lines = [{"messages": turns(text, text[::-1])} for text in ("abc", "bcd", "cde", "def", "efg", "fgh", "ghi")]
    train = folder / "train.jsonl"
    train.write_text("\n".join(map(json.dumps, lines)))
    config = SftConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": str(train), "eval": str(train), "steps": 6, "batch_size": 4, "shuffle": True, **data},
            "trainer": {"use": "fsdp", "threads": 1, "device": "cpu", "lr": 1e-2, "row_tokens": 64},
            "checkpoint": {"every": 2, "keep": 1},
        }
    )
    run = RunDir(at)
    at.mkdir()
    run.config.write_text(config.model_dump_json())
    return run


def metrics(run: RunDir) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("time/")} for line in lines]


def test_a_run_learns_and_its_model_loads(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = write_config(folder, tmp_path / "run", steps=25)
    assert sft.main(str(run.path)) == 0
    found = metrics(run)
    assert [line["step"] for line in found] == list(range(1, 26))
    assert found[-1]["train/loss"] < 0.5 * found[0]["train/loss"]
    assert found[-1]["train/loss"] == pytest.approx(found[-1]["loss/nll"], rel=1e-5)
    summary = json.loads(run.summary.read_text())
    assert summary["outcome"] == "completed" and summary["steps"] == 25
    assert summary["eval_loss"] == found[-1]["eval/loss"] < found[0]["train/loss"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000025"]
    AutoModelForCausalLM.from_pretrained(run.path / "model")
    assert AutoTokenizer.from_pretrained(run.path / "model").chat_template == TEMPLATE


def test_stopping_and_resuming_changes_nothing(folder: Path, tmp_path: Path) -> None:
    whole = write_config(folder, tmp_path / "whole")
    assert sft.main(str(whole.path)) == 0
    parts = write_config(folder, tmp_path / "parts")
    first = sft.SftRun(parts)
    first._one_step(1)
    first._one_step(2)
    first._one_step(3)
    first.stop()
    with pytest.raises(Preempted, match="after step 3 of 6"):
        first.run()
    first.close("stopped", None)
    assert sft.main(str(parts.path)) == 0
    assert metrics(parts) == metrics(whole)
    name = "model/model.safetensors"
    assert (parts.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_sigterm_is_exit_code_75(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_config(folder, tmp_path / "run")
    step = sft.SftRun._one_step

    def interrupted(self: sft.SftRun, number: int) -> None:
        step(self, number)
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sft.SftRun, "_one_step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert sft.main(str(run.path)) == 75
    finally:
        signal.signal(signal.SIGTERM, before)
    assert json.loads(run.summary.read_text())["outcome"] == "stopped"
    assert (run.checkpoint(2) / "MANIFEST.json").exists()


def test_a_missing_file_is_a_config_error(folder: Path, tmp_path: Path) -> None:
    assert sft.main(str(write_config(folder, tmp_path / "run", train="/none.jsonl").path)) == 2


def test_the_plan_is_the_trainer_alone(folder: Path, tmp_path: Path) -> None:
    run = write_config(folder, tmp_path / "run")
    plan = build_plan(SftConfig.model_validate_json(run.config.read_bytes()), run)
    assert [(role.name, role.purpose) for role in plan.roles] == [("trainer", "main")]
    assert plan.roles[0].command[1:] == ("-m", "prl_trainer_fsdp.sft", "{run_dir}")
