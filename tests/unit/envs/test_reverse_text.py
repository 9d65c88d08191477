from __future__ import annotations

from typing import Any

import pytest

from prl.errors import ConfigError
from prl_envs.config import ReverseTextConfig
from prl_envs.reverse_text import ReverseText, is_held_out


def env(**settings: Any) -> ReverseText:
    return ReverseText(ReverseTextConfig(**settings))


def score(answer: str, text: str = "abcd", **settings: Any) -> dict[str, float]:
    it = env(**settings)
    return it.score(it._task("train", 0, text), answer)


def test_the_splits_share_no_text_and_agree_with_is_held_out() -> None:
    it = env(alphabet="abc", min_length=3, max_length=6, eval_tasks=60)
    train = {task.data["text"] for task in it.tasks("train")[:3000]}
    held_out = {task.data["text"] for task in it.tasks("eval")}
    assert len(held_out) == 60
    assert not train & held_out
    assert all(is_held_out(text, it.config) for text in held_out)
    assert not any(is_held_out(text, it.config) for text in train)


def test_tasks_depend_on_the_seed_alone() -> None:
    one, two, other = env(seed=1), env(seed=1), env(seed=2)
    assert list(one.tasks("train")[:50]) == list(two.tasks("train")[:50])
    assert list(one.tasks("eval")[:50]) == list(two.tasks("eval")[:50])
    assert [t.prompt for t in one.tasks("train")[:50]] != [t.prompt for t in other.tasks("train")[:50]]
    assert one.tasks("train")[999_999].id == "train-999999"


def test_the_prompt_is_the_text_after_an_instruction_if_any() -> None:
    task = env().tasks("train")[0]
    assert task.prompt == task.data["text"]
    assert task.data["answer"] == task.data["text"][::-1]
    assert 3 <= len(task.data["text"]) <= 6
    told = env(instruction="Reverse: ").tasks("train")[0]
    assert told.prompt == f"Reverse: {task.prompt}"


@pytest.mark.parametrize(
    ("answer", "reward", "exact"),
    [
        ("dcba", 1.0, 1.0),
        (" dcba\n", 1.0, 1.0),
        ("", 0.0, 0.0),
        ("abcd", 0.0, 0.0),
        ("dcab", 0.5 * 2 / 5, 0.0),
        ("dcb", 0.5 * 3 / 5, 0.0),
        ("dcbaa", 0.5 * 4 / 5, 0.0),
    ],
)
def test_the_reward_of_a_right_beginning(answer: str, reward: float, exact: float) -> None:
    assert score(answer) == {"reward": pytest.approx(reward), "exact_match": exact}


def test_other_partial_rewards() -> None:
    assert score("xcba", partial="position")["reward"] == pytest.approx(0.5 * 4 / 5)
    assert score("dcbaxxxx", partial="position")["reward"] == pytest.approx(0.5 * 4 / 9)
    assert score("dcb", partial="none")["reward"] == 0.0
    assert score("dcba", partial="none")["reward"] == 1.0


def test_too_few_texts_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match="different texts are held out, 1000 wanted.*lower eval_tasks"):
        env(alphabet="ab", min_length=1, max_length=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_length": 5, "max_length": 4}, "max_length is 4, less than min_length 5"),
        ({"alphabet": "aab"}, "a letter occurs twice"),
        ({"alphabet": " ab"}, "white space"),
        ({"held_out": 0.0}, "greater than 0"),
        ({"letters": 3}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReverseTextConfig(**settings)
