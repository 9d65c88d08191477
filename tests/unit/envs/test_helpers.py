"""The helpers for environment authors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prl.env import SingleTurnEnv, TaskList, scored, share, stable_seed
from prl.types import Message, Reward, Rollout, Task, Turn


class Agent:
    """Answers with what it was asked, in capitals."""

    def __init__(self) -> None:
        self.name = "policy"
        self.messages: list[Message] = []

    async def reply(self, messages: Any, **_: Any) -> Turn:
        return Turn(Message("assistant", messages.upper()), "stop", 1, 1)

    def finish(self, rewards: Any) -> Rollout:
        return Rollout("policy", rewards={"reward": Reward(rewards)})


class Context:
    def agent(self) -> Agent:
        return Agent()


class Shout(SingleTurnEnv):
    def score(self, task: Task, text: str) -> float:
        return float(text == "ABC")


class SlowShout(SingleTurnEnv):
    async def score(self, task: Task, text: str) -> dict[str, float]:  # type: ignore[override]
        await asyncio.sleep(0)
        return {"reward": 0.25, "length": len(text)}


def test_a_single_turn_environment_is_a_score_function() -> None:
    episode = asyncio.run(Shout().run(Task("t", "abc"), Context()))  # type: ignore[arg-type]
    assert episode.rollouts[0].reward == 1.0


def test_a_score_may_be_awaited_and_bring_metrics() -> None:
    episode = asyncio.run(SlowShout().run(Task("t", "abc"), Context()))  # type: ignore[arg-type]
    assert episode.rollouts[0].reward == 0.25
    assert episode.metrics == {"length": 3.0}


def test_a_score_without_a_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'reward'; this one has \['points'\]"):
        scored(Agent(), {"points": 1.0})


def test_a_task_list_is_a_sequence() -> None:
    tasks = TaskList(5, lambda index: Task(str(index)))
    assert len(tasks) == 5
    assert [task.id for task in tasks] == ["0", "1", "2", "3", "4"]
    assert tasks[-1].id == "4"
    assert [task.id for task in tasks[1:10:2]] == ["1", "3"]
    with pytest.raises(IndexError):
        tasks[5]


def test_shares_and_seeds_are_the_same_in_every_process() -> None:
    assert share("abc") == pytest.approx(0.8912456727834821)
    assert share("abc", "salt") != share("abc")
    assert sum(share(str(i)) < 0.1 for i in range(10_000)) == pytest.approx(1_000, abs=100)
    assert stable_seed(1, "policy", 0) == stable_seed(1, "policy", 0)
    assert len({stable_seed(1, "policy", turn) for turn in range(1_000)}) == 1_000
    assert 0 <= stable_seed("x") < 2**64
    assert stable_seed(1, "1") != stable_seed("11")
