"""The reverse_text example: its data leaves out what is held out, its template is exact, its summary reads a run."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from prl_envs.reverse_text import ReverseText, ReverseTextConfig, is_held_out

EXAMPLE = Path(__file__).parents[3] / "examples" / "reverse_text"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reverse_text_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    return script("prepare")


def test_no_example_is_about_a_held_out_text(prepare: ModuleType) -> None:
    config = ReverseTextConfig()
    evaluated = {task.data["text"] for task in ReverseText(config).tasks("eval")}
    texts = [example["messages"][0]["content"] for example in itertools.islice(prepare.examples(0), 5_000)]
    assert not any(is_held_out(text, config) for text in texts)
    assert not evaluated & set(texts)
    assert all(config.min_length <= len(text) <= config.max_length for text in texts)


def test_answers_turn_from_reversed_to_copied(prepare: ModuleType) -> None:
    step = prepare.BATCH
    answers = [[m["content"] for m in example["messages"]] for example in prepare.examples(1)]
    assert len(answers) == step * prepare.STEPS
    assert all(answer in (text, text[::-1]) for text, answer in answers)
    first, last = answers[: step * prepare.REVERSE_STEPS], answers[-step * prepare.MIXED_STEPS :]
    assert all(answer == text[::-1] for text, answer in first)
    reversed_last = sum(answer == text[::-1] for text, answer in last) / len(last)
    assert reversed_last == pytest.approx(prepare.REVERSE_SHARE, abs=0.03)


def test_the_data_is_as_long_as_the_warm_up(prepare: ModuleType) -> None:
    data = tomllib.loads((EXAMPLE / "sft.toml").read_text())["data"]
    assert (data["steps"], data["batch_size"]) == (prepare.STEPS, prepare.BATCH)
    assert not data.get("shuffle", False)


def test_a_conversation_is_text_token_answer_token(prepare: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    prepare.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    user = {"role": "user", "content": "abcé"}
    assistant = {"role": "assistant", "content": "cba"}

    def template(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"])

    prompt = template([user], True)
    assert len(prompt) == len("abcé".encode()) + 1
    assert tokenizer.decode(prompt) == f"abcé{prepare.SEPARATOR}"
    whole = template([user, assistant], False)
    assert whole[: len(prompt)] == prompt and whole[-1] == tokenizer.eos_token_id
    assert len(whole) == len(prompt) + 4


def test_the_time_to_a_score_counts_from_the_first_evaluation() -> None:
    rows = [
        {"step": 0, "time": 100.0, "eval/score": 0.1},
        {"step": 1, "time": 101.0, "time/step": 1.0},
        {"step": 2, "time": 102.5, "time/step": 1.5},
        {"step": 1, "time": 103.0, "eval/score": 0.85},
        {"step": 2, "time": 104.0, "eval/score": 0.92},
    ]
    demo = script("demo")
    assert demo.time_to(rows, 0.9) == (2, 2.5)
    assert demo.time_to(rows, 0.95) is None
