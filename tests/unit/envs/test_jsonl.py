from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from prl import registry
from prl.errors import ConfigError, PluginError
from prl.types import Message

REWARD = """
def score(task, text):
    return {"reward": float(text == task.data["answer"]), "length": len(text)}

async def slow(task, text):
    return 0.5
"""


def write(path: Path, *records: Any) -> str:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return str(path)


def build(tmp_path: Path, *records: Any, name: str = "score", **settings: Any) -> Any:
    (tmp_path / "reward.py").write_text(REWARD)
    path = write(tmp_path / "data.jsonl", *records)
    return registry.build("envs", "jsonl", {"path": path, "reward": f"{tmp_path}/reward.py:{name}", **settings})


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(count)]


def test_fields_become_the_tasks_data_and_the_function_scores(tmp_path: Path) -> None:
    env = build(tmp_path, *questions(50))
    task = env.tasks("train")[0]
    assert task.prompt == f"question {task.data['answer']}"
    assert env.score(task, task.data["answer"]) == {"reward": 1.0, "length": len(task.data["answer"])}
    slow = build(tmp_path, *questions(50), name="slow")
    assert asyncio.run(slow.score(task, "")) == 0.5


def test_a_share_is_held_out_by_the_prompt(tmp_path: Path) -> None:
    env = build(tmp_path, *questions(200), *questions(200), held_out=0.2)
    train, held_out = ({task.prompt for task in env.tasks(split)} for split in ("train", "eval"))
    assert len(train) + len(held_out) == 200
    assert not train & held_out
    assert len(held_out) == pytest.approx(40, abs=15)


def test_an_evaluation_file_takes_its_prompts_out_of_training(tmp_path: Path) -> None:
    other = write(tmp_path / "eval.jsonl", *questions(3))
    env = build(tmp_path, *questions(10), eval_path=other)
    assert [task.prompt for task in env.tasks("eval")] == ["question 0", "question 1", "question 2"]
    assert len(env.tasks("train")) == 7


def test_the_order_is_seeded_or_that_of_the_file(tmp_path: Path) -> None:
    def order(**settings: Any) -> list[str]:
        return [task.id for task in build(tmp_path, *questions(60), **settings).tasks("train")]

    assert order(seed=1) == order(seed=1) != order(seed=2)
    in_file = order(shuffle=False)
    assert in_file == sorted(in_file, key=lambda id: int(id.partition("-")[2]))


def test_messages_and_a_system_message(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "x"},
    ]
    env = build(tmp_path, {"messages": chat, "id": "mine"}, "", {"prompt": "p"}, system="Be kind.", held_out=1e-9)
    by_id = {task.id: task for task in env.tasks("train")}
    assert [m.role for m in by_id["mine"].prompt] == ["system", "user", "assistant", "user"]
    assert by_id["data-3"].prompt == (Message("system", "Be kind."), Message("user", "p"))


def test_every_bad_line_is_named_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build(
            tmp_path,
            {"prompt": "fine"},
            '{"prompt": "cut off',
            "[1]",
            {"answer": 1},
            {"prompt": "a", "messages": []},
            {"prompt": 3},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "assistant", "content": "x"}]},
            {"prompt": "b", "id": "data-1"},
            '{"prompt": "c", "x": NaN}',
        )
    problems = error.value.problems
    assert [int(p.removeprefix(f"{tmp_path}/data.jsonl:").partition(":")[0]) for p in problems] == [*range(2, 11)]
    for problem, expected in zip(
        problems,
        ["not JSON", "an object", "exactly one", "exactly one", "text", "content", "assistant's", "line 1", "NaN"],
        strict=True,
    ):
        assert expected in problem


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build(tmp_path, *["{}"] * 100)
    assert len(error.value.problems) == 21
    assert "and 80 more" in error.value.problems[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "/no/such/file.jsonl"}, "path: there is no file /no/such/file.jsonl"),
        ({"eval_path": "held_out.jsonl"}, "eval_path: there is no file held_out.jsonl"),
        ({"reward": "./no_such_file.py:score"}, "reward: there is no file"),
        ({"reward": "reward"}, "a function in a file is needed"),
    ],
)
def test_files_that_are_not_there(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        build(tmp_path, *questions(3), **settings)


def test_an_empty_file_and_an_empty_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no task in it"):
        build(tmp_path, "")
    env = build(tmp_path, *questions(3), held_out=1e-9)
    with pytest.raises(ConfigError, match=r"set eval.tasks = 0"):
        env.tasks("eval")
