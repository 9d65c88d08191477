"""Running an environment without a model: agents whose answers are scripted.

    episode = await play(env, task, lambda request, turn: "an answer")

The context and the agents are those of the real worker (`prl.envworker.context`); only what stands behind them, the
gateway with its engines, is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from prl.envworker.context import EpisodeContext
from prl.messages import EpisodeRequest, ReplyRequest
from prl.protocols import Env
from prl.types import Episode, Message, Sampling, StopReason, Task, Turn

Script = Callable[[ReplyRequest, int], str]
"""What to answer: from the request and how many turns were answered before in this episode."""

Gateway = Callable[[ReplyRequest], Awaitable[Turn]]


def context(task: Task, gateway: Gateway, *, seed: int = 0, deadline_s: float = 60.0) -> EpisodeContext:
    """A context whose agents are answered by `gateway`."""
    request = EpisodeRequest(
        episode_id=1,
        env="scripted",
        task=task,
        seed=seed,
        sampling=Sampling(),
        gateway="",
        key="",
        deadline_s=deadline_s,
    )
    return EpisodeContext(request, gateway, logging.getLogger("prl.testing.scripted"))


def scripted(script: Script, stop_reason: StopReason = "stop") -> Gateway:
    """A gateway that answers from a script, after giving others a turn."""
    turns = 0

    async def answer(request: ReplyRequest) -> Turn:
        nonlocal turns
        turns, turn = turns + 1, turns
        await asyncio.sleep(0)
        text = script(request, turn)
        return Turn(Message("assistant", text), stop_reason, num_tokens=len(text) + 1, num_prompt_tokens=1)

    return answer


async def play(
    env: Env, task: Task, script: Script, *, stop_reason: StopReason = "stop", seed: int = 0, limit_s: float = 10.0
) -> Episode:
    """One episode of `env`.

    Raises:
        TimeoutError: it did not end within `limit_s`, though every answer came at once.
    """
    async with asyncio.timeout(limit_s):
        return await env.run(task, context(task, scripted(script, stop_reason), seed=seed, deadline_s=limit_s))
