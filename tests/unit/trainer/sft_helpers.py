"""A tokenizer of letters for the tiny model, and configurations of supervised runs over small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.schema import SftConfig
from prl.rundir import RunDir

from .helpers import save_model

TEMPLATE = (
    "{%- for m in messages -%}"
    "{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
WORDS = ("abc", "bcd", "cde", "def", "efg", "fgh", "ghi")


def save_tokenizer(out: Path, template: str | None = TEMPLATE) -> None:
    """Letters, newline and four special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz .\n"
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = template
    fast.save_pretrained(out)


def save_all(out: Path) -> Path:
    save_model(out)
    save_tokenizer(out)
    return out


def turns(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def conversations(words: tuple[str, ...] = WORDS) -> list[dict[str, Any]]:
    return [{"messages": turns(text, text[::-1])} for text in words]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_config(folder: Path, at: Path, *, trainer: dict[str, Any] | None = None, **data: Any) -> RunDir:
    """A run directory as `prl sft` leaves it: six steps of four of seven rows, shuffled."""
    train = write_jsonl(folder / "train.jsonl", conversations())
    own = {"use": "fsdp", "threads": 1, "device": "cpu", "lr": 1e-2, "row_tokens": 64, **(trainer or {})}
    config = SftConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": train, "eval": train, "batch_size": 4, "shuffle": True, **data}
            | ({} if {"steps", "epochs"} & data.keys() else {"steps": 6}),
            "trainer": own,
            "checkpoint": {"every": 2, "keep": 1},
        }
    )
    run = RunDir(at)
    at.mkdir()
    run.config.write_text(config.model_dump_json())
    return run


def metrics(run: RunDir) -> list[dict[str, float]]:
    """Without times."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("time/")} for line in lines]


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [event for event in found if event.get("kind", event.get("event")) == kind]
