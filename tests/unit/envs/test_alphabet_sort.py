from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from prl.types import Episode, Message, Reward, Rollout, Task, Turn
from prl_envs.alphabet_sort import FIRST, LATER, AlphabetSort, similarity
from prl_envs.config import AlphabetSortConfig


def env(**settings: Any) -> AlphabetSort:
    return AlphabetSort(AlphabetSortConfig(**settings))


class Agent:
    def __init__(self, answer: Callable[[list[str]], str]) -> None:
        self.asked: list[str] = []
        self._answer = answer

    async def reply(self, prompt: str) -> Turn:
        self.asked.append(prompt)
        names = [name for text in self.asked for name in text.partition("\n\n")[2].split("\n")]
        return Turn(Message("assistant", self._answer(names)), "stop", 1, 1)

    def finish(self, reward: float) -> Rollout:
        return Rollout("policy", rewards={"reward": Reward(reward)})


def play(task: Task, answer: Callable[[list[str]], str], **settings: Any) -> tuple[Episode, Agent]:
    agent = Agent(answer)
    context: Any = type("Context", (), {"agent": lambda self: agent})()
    return asyncio.run(env(**settings).run(task, context)), agent


def test_a_right_answer_in_every_turn_earns_one() -> None:
    task = env().tasks("train")[0]
    episode, agent = play(task, lambda names: "\n".join(sorted(names)))
    assert episode.rollouts[0].reward == 1.0
    assert episode.metrics == {"turns": float(len(task.data["turns"])), "exact_match": 1.0}
    assert agent.asked[0] == task.prompt
    assert agent.asked[0].startswith(FIRST)
    assert all(text.startswith(LATER) for text in agent.asked[1:])


def test_the_reward_is_the_mean_over_turns_of_a_power_of_the_similarity() -> None:
    task = Task("t", data={"turns": [["b", "a"], ["c"]]})
    answers = iter(["a\nb", "a\nb"])
    episode, _ = play(task, lambda names: next(answers), power=2.0)
    # Three of the five letters of "a\nb\nc" are there: 2 * 3 / (3 + 5).
    assert episode.rollouts[0].reward == pytest.approx((1 + 0.75**2) / 2)
    assert episode.metrics["exact_match"] == 0.0


def test_similarity_ignores_case_and_margins_only() -> None:
    assert similarity("  Ann \n\nBob\n", ["ann", "bob"]) == 1.0
    assert similarity("bob\nann", ["ann", "bob"]) < 1.0
    assert similarity("", ["ann"]) == 0.0
    assert similarity("ann" * 5, ["ann"]) == 0.0


def test_tasks_are_seeded_within_their_limits_and_the_splits_disjoint() -> None:
    it = env(min_turns=1, max_turns=3, min_names=2, max_names=5)
    train, held_out = list(it.tasks("train")[:400]), list(it.tasks("eval")[:100])
    assert train == list(env(min_turns=1, max_turns=3, min_names=2, max_names=5).tasks("train")[:400])
    assert {len(task.data["turns"]) for task in train} == {1, 2, 3}
    assert {len(batch) for task in train for batch in task.data["turns"]} == {2, 3, 4, 5}
    for task in train:
        names = [name for batch in task.data["turns"] for name in batch]
        assert len(set(names)) == len(names)
    assert not {str(t.data) for t in train} & {str(t.data) for t in held_out}
    assert train[:5] != list(env(seed=1, min_turns=1, max_turns=3, min_names=2, max_names=5).tasks("train")[:5])


def test_the_largest_list_can_be_made() -> None:
    [task] = env(min_turns=10, max_turns=10, min_names=100, max_names=100).tasks("train")[:1]
    assert sum(map(len, task.data["turns"])) == 1000
    with pytest.raises(ValueError, match="max_turns \\* max_names is 1001"):
        AlphabetSortConfig(max_turns=11, max_names=91)
