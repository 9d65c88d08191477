"""The worker against a gateway on the wire: what reaches the gateway, and what each way to end becomes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from prl import faults
from prl.env import stable_seed
from prl.envworker.worker import Worker
from prl.errors import EpisodeFailed, WireError
from prl.faults import Fault
from prl.messages import (
    CANCEL_EPISODE,
    LIST_TASKS,
    REPLY,
    RUN_EPISODE,
    CancelEpisode,
    EpisodeReply,
    EpisodeRequest,
    ReplyRequest,
    TaskPage,
)
from prl.protocols import Context
from prl.types import Episode, EpisodeError, Message, Reward, Rollout, Sampling, Task, Turn
from prl.wire import Client, Server

TOKEN = "token"
Script = Callable[[Task, Context], Awaitable[Any]]


class FakeGateway:
    """Answers "<role of the last message>:<its content>" and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[ReplyRequest] = []
        self.server = Server(TOKEN, {REPLY: self._reply})
        self.address = self.server.start()
        self.failure: EpisodeFailed | None = None
        self.stop_reason: Any = "stop"

    async def _reply(self, peer: object, request: ReplyRequest) -> Turn:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        if request.messages[-1].content == "hang":
            await asyncio.Event().wait()
        last = request.messages[-1]
        return Turn(Message("assistant", f"re {last.content}"), self.stop_reason, 3, 5)


class ScriptedEnv:
    def __init__(self, script: Script) -> None:
        self._script = script

    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{i}", prompt=str(i)) for i in range(5)]

    async def run(self, task: Task, ctx: Context) -> Any:
        return await self._script(task, ctx)


class Bench:
    """A worker on the wire, as the controller sees it."""

    def __init__(self, env: Any) -> None:
        self.gateway = FakeGateway()
        self.worker = Worker("test", env, TOKEN)
        self._server = Server(TOKEN, self.worker.handlers)
        self.client = Client(self._server.start(), TOKEN, name="worker")

    async def run(
        self, episode_id: int = 1, *, prompt: str = "abc", seed: int = 7, deadline_s: float = 5.0
    ) -> EpisodeReply:
        return await self.client.call(RUN_EPISODE, self.request(episode_id, prompt, seed, deadline_s), timeout=5)

    def request(self, episode_id: int, prompt: str = "abc", seed: int = 7, deadline_s: float = 5.0) -> EpisodeRequest:
        task = Task(id="t", prompt=prompt)
        return EpisodeRequest(
            episode_id,
            "test",
            task,
            seed,
            Sampling(max_tokens=16),
            self.gateway.address,
            f"{episode_id}.key",
            deadline_s,
        )

    async def close(self) -> None:
        self.client.close()
        self._server.close()
        await self.worker.close()
        self.gateway.server.close()


@contextlib.asynccontextmanager
async def bench(script: Script) -> AsyncIterator[Bench]:
    it = Bench(ScriptedEnv(script))
    try:
        yield it
    finally:
        await it.close()


def run_once(script: Script, **request: Any) -> tuple[EpisodeReply, FakeGateway]:
    async def main() -> tuple[EpisodeReply, FakeGateway]:
        async with bench(script) as it:
            return await it.run(**request), it.gateway

    return asyncio.run(main())


def failing(script: Script, **request: Any) -> EpisodeError:
    reply, _ = run_once(script, **request)
    assert reply.error is not None
    assert reply.rollouts == []
    return reply.error


async def single(task: Task, ctx: Context) -> Episode:
    agent = ctx.agent()
    turn = await agent.reply(task.prompt)
    return Episode([agent.finish(len(turn.text) / 10)], metrics={"length": len(turn.text)})


def test_a_single_turn_episode() -> None:
    reply, gateway = run_once(single)
    assert reply.error is None
    assert reply.episode_id == 1
    assert reply.metrics == {"length": 6.0}
    [rollout] = reply.rollouts
    assert rollout.rewards == {"reward": Reward(0.6)}
    assert rollout.messages == [Message("user", "abc"), Message("assistant", "re abc")]
    assert (rollout.num_turns, rollout.truncated, rollout.stop_reason) == (1, False, "stop")
    [request] = gateway.requests
    assert (request.key, request.agent, request.keep) == ("1.key", "policy", 0)
    assert request.messages == (Message("user", "abc"),)
    assert request.sampling.max_tokens == 16
    assert 4.0 < request.deadline_s <= 5.0


def test_later_turns_send_only_what_is_new_and_have_their_own_seeds() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        agent = ctx.agent("player")
        for text in ("one", "two", "three"):
            await agent.reply(text, max_tokens=4)
        return Episode([agent.finish({"a": 1, "b": Reward(0.5, 2.0), "c": None})])

    reply, gateway = run_once(script, seed=99)
    assert [request.keep for request in gateway.requests] == [0, 2, 4]
    assert [[m.content for m in request.messages] for request in gateway.requests] == [["one"], ["two"], ["three"]]
    assert [request.seed for request in gateway.requests] == [stable_seed(99, "player", turn) for turn in range(3)]
    assert {request.sampling.max_tokens for request in gateway.requests} == {4}
    assert reply.rollouts[0].rewards == {"a": Reward(1.0), "b": Reward(0.5, 2.0), "c": None}
    assert reply.rollouts[0].reward is None


def test_an_edited_history_is_sent_from_the_edit_on() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        await agent.reply([{"role": "system", "content": "s"}, {"role": "user", "content": "one"}])
        agent.messages[1:] = [Message("user", "summary")]
        await agent.reply("two")
        return Episode([agent.finish(1.0)])

    _, gateway = run_once(script)
    assert [request.keep for request in gateway.requests] == [0, 1]
    assert [m.content for m in gateway.requests[1].messages] == ["summary", "two"]


def test_two_agents_have_conversations_of_their_own() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        first, second = ctx.agent("a"), ctx.agent("b", trainable=False)
        assert ctx.agent("a") is first
        await asyncio.gather(first.reply("x"), second.reply("y"))
        return Episode([first.finish(1.0), second.finish(0.0)])

    reply, gateway = run_once(script)
    assert sorted(request.agent for request in gateway.requests) == ["a", "b"]
    assert [(r.agent, r.trainable) for r in reply.rollouts] == [("a", True), ("b", False)]


def test_a_turn_cut_off_by_its_limit_marks_the_rollout() -> None:
    async def main() -> EpisodeReply:
        async with bench(single) as it:
            it.gateway.stop_reason = "length"
            return await it.run()

    [rollout] = asyncio.run(main()).rollouts
    assert rollout.truncated
    assert rollout.stop_reason == "length"


def test_the_same_seed_gives_the_same_random_numbers() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        return Episode([agent.finish(ctx.rng.random())])

    scores = [run_once(script, seed=seed)[0].rollouts[0].reward for seed in (5, 5, 6)]
    assert scores[0] == scores[1] != scores[2]


def test_an_exception_is_an_env_error_with_its_traceback() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        raise KeyError("no such thing")

    error = failing(script)
    assert (error.reason, error.retryable) == ("env_error", False)
    assert "KeyError: 'no such thing'" in error.message
    assert "in script" in error.message


def test_sys_exit_does_not_end_the_worker() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        raise SystemExit(3)

    assert failing(script).reason == "env_error"


def test_the_deadline_ends_an_episode_that_waits() -> None:
    error = failing(single, prompt="hang", deadline_s=0.05)
    assert (error.reason, error.retryable) == ("timeout", False)
    assert "0.05 s" in error.message


def test_a_timeout_error_of_the_environment_itself_is_its_own_error() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        raise TimeoutError("a tool took too long")

    assert failing(script).reason == "env_error"


@pytest.mark.parametrize("swallow", [False, True])
def test_a_failure_of_the_gateway_keeps_its_reason_even_when_swallowed(swallow: bool) -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        if swallow:
            with contextlib.suppress(Exception):
                await agent.reply("x")
        else:
            await agent.reply("x")
        return Episode([agent.finish(0.0)])

    async def main() -> EpisodeReply:
        async with bench(script) as it:
            it.gateway.failure = EpisodeFailed("engine_lost", "gone", retryable=True)
            return await it.run()

    error = asyncio.run(main()).error
    assert error == EpisodeError("engine_lost", "gone", True)


def test_a_lost_gateway_fails_what_is_in_flight_at_once_and_may_be_retried() -> None:
    async def main() -> EpisodeReply:
        async with bench(single) as it:
            episode = asyncio.ensure_future(it.run(prompt="hang"))
            while not it.gateway.requests:
                await asyncio.sleep(0.005)
            it.gateway.server.close()
            return await episode

    error = asyncio.run(main()).error
    assert error is not None
    assert (error.reason, error.retryable) == ("gateway_lost", True)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(score: float) -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        return Episode([ctx.agent().finish(score)])

    assert failing(script).reason == "bad_reward"


def test_rewards_of_other_number_types_become_floats() -> None:
    import numpy as np

    async def script(task: Task, ctx: Context) -> Episode:
        rollout = Rollout("policy", rewards={"reward": Reward(np.float32(0.5), 1)})  # type: ignore[arg-type]
        return Episode([rollout], metrics={"flag": True, "mean": np.float64(2.0), "undefined": math.nan})

    reply, _ = run_once(script)
    assert reply.rollouts[0].rewards == {"reward": Reward(0.5, 1.0)}
    assert reply.metrics == {"flag": 1.0, "mean": 2.0}


@pytest.mark.parametrize(
    "result",
    [
        None,
        Episode([]),
        Episode([Rollout("a"), Rollout("a")]),
        Episode(["not a rollout"]),  # type: ignore[list-item]
        Episode([Rollout("a", messages=["not a message"])]),  # type: ignore[list-item]
        Episode([Rollout("a", messages=[Message("assistant", "", tool_calls=({"x": object()},))])]),
    ],
)
def test_a_malformed_result_is_refused(result: Any) -> None:
    async def script(task: Task, ctx: Context) -> Any:
        return result

    assert failing(script).reason == "bad_result"


def test_an_error_the_environment_reports_is_passed_on() -> None:
    async def script(task: Task, ctx: Context) -> Episode:
        return Episode([], errors=[EpisodeError("no_sandbox", "none is free", True)])

    assert failing(script) == EpisodeError("no_sandbox", "none is free", True)


def test_a_cancelled_episode_answers_and_frees_its_place() -> None:
    async def main() -> tuple[EpisodeReply, int]:
        async with bench(single) as it:
            episode = asyncio.ensure_future(it.run(4, prompt="hang"))
            while not it.gateway.requests:
                await asyncio.sleep(0.005)
            assert it.worker.in_flight == 1
            await it.client.call(CANCEL_EPISODE, CancelEpisode(4), timeout=1)
            return await episode, it.worker.in_flight

    reply, left = asyncio.run(main())
    assert reply.error is not None
    assert reply.error.reason == "cancelled"
    assert left == 0


def test_many_episodes_run_at_once() -> None:
    async def main() -> int:
        release = asyncio.Event()

        async def script(task: Task, ctx: Context) -> Episode:
            await release.wait()
            return Episode([ctx.agent().finish(1.0)])

        async with bench(script) as it:
            episodes = [asyncio.ensure_future(it.run(i)) for i in range(100)]
            while it.worker.in_flight < 100:
                await asyncio.sleep(0.005)
            release.set()
            replies = await asyncio.gather(*episodes)
            return sum(reply.error is None for reply in replies)

    assert asyncio.run(main()) == 100


def test_fault_injection_reaches_an_episode() -> None:
    faults.install("env-test", plan=[Fault("env-test", "env.run", "error", at=1)])
    try:
        assert "fault injection" in failing(single).message
    finally:
        faults.install("nobody", plan=[])


def test_tasks_and_unknown_labels() -> None:
    async def main() -> None:
        async with bench(single) as it:
            page = await it.client.call(LIST_TASKS, TaskPage("test", "eval", 3, 10), timeout=2)
            assert [task.id for task in page] == ["eval-3", "eval-4"]
            with pytest.raises(WireError, match="'test', not 'other'"):
                await it.client.call(LIST_TASKS, TaskPage("other", "eval", 0, 1), timeout=2)

    asyncio.run(main())


def test_what_is_no_environment_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="'x': object has no method 'tasks'"):
        Worker("x", object(), TOKEN)  # type: ignore[arg-type]
