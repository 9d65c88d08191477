"""Mistakes of environment authors: each costs its episode, with a reason that helps; none costs the run or its time."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from prl.envworker.tasks import TaskPages
from prl.errors import RunFailed
from prl.messages import EpisodeReply
from prl.protocols import Context
from prl.types import Episode, EpisodeError, Message, Reward, Rollout, Task

from .test_worker import Script, bench


def attempt(script: Script) -> EpisodeReply:
    async def main() -> EpisodeReply:
        async with bench(script) as it:
            return await it.run()

    return asyncio.run(main())


def returning(episode: Any) -> Script:
    async def script(task: Task, ctx: Context) -> Any:
        return episode

    return script


def rollout(**fields: Any) -> Rollout:
    return Rollout(**{"agent": "policy", "rewards": {"reward": Reward(1.0)}, **fields})


@pytest.mark.parametrize(
    "episode",
    [
        Episode([rollout(stop_reason="done")]),
        Episode([rollout(truncated="no")]),
        Episode([rollout(num_turns=1.5)]),
        Episode([rollout(agent=7)]),
        Episode([rollout(trainable=None)]),
        Episode([rollout(messages=[Message("assistant", None)])]),  # type: ignore[arg-type]
        Episode([rollout(messages=[Message("assistant", "\ud800")])]),
        Episode([], errors=["it broke"]),  # type: ignore[list-item]
        Episode([], errors=[EpisodeError("broken", ValueError("x"))]),  # type: ignore[arg-type]
    ],
    ids=lambda episode: repr(episode)[:80],
)
def test_a_field_of_a_wrong_type_is_a_bad_result_and_reaches_no_one(episode: Episode) -> None:
    error = attempt(returning(episode)).error
    assert error is not None and error.reason == "bad_result" and not error.retryable


@pytest.mark.parametrize(
    "rewards",
    [
        {"reward": Reward(1e300, 1e300)},
        {"a": Reward(1e308), "b": Reward(1e308)},
        {"reward": Reward(-1e30)},
        {"reward": Reward(float("nan"))},
        {"reward": Reward("high")},  # type: ignore[arg-type]
    ],
)
def test_a_reward_that_float32_cannot_hold_is_refused(rewards: dict[str, Reward]) -> None:
    """Rewards of 1e300 are finite one by one; their mean, or their float32, is not."""
    error = attempt(returning(Episode([rollout(rewards=rewards)]))).error
    assert error is not None and error.reason == "bad_reward"


def test_an_environment_that_awaits_what_it_has_cancelled_fails_at_once() -> None:
    """The cancellation is the environment's own: it must not look as if the episode never answered."""

    async def script(task: Task, ctx: Context) -> Any:
        mine = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        mine.cancel()
        await mine

    error = attempt(script).error
    assert error is not None and error.reason == "env_error" and "CancelledError" in error.message


@pytest.mark.parametrize("how", [SystemExit, lambda code: sys.exit(code)])
def test_an_environment_that_exits_fails_its_episode_only(how: Any) -> None:
    async def script(task: Task, ctx: Context) -> Any:
        raise how(3)

    error = attempt(script).error
    assert error is not None and error.reason == "env_error"


@pytest.mark.parametrize(
    "task",
    [
        Task("a", data={1: "one"}),  # type: ignore[dict-item]
        Task(5),  # type: ignore[arg-type]
        Task("a", prompt=["hello"]),  # type: ignore[arg-type]
        Task("a", data={"number": 10**30}),
        Task("a", data=None),  # type: ignore[arg-type]
        Task("a", data={"text": "\ud800"}),
        Task("a", data={"function": print}),
    ],
    ids=repr,
)
def test_a_task_that_does_not_survive_the_way_is_refused_where_it_was_made(task: Task) -> None:
    class Env:
        def tasks(self, split: str) -> list[Task]:
            return [Task("fine"), task]

    with pytest.raises(RunFailed, match=r"Env.tasks\('train'\)\[1\].*cannot be written as JSON and read back"):
        TaskPages(Env()).page("train", 0, 10)  # type: ignore[arg-type]
