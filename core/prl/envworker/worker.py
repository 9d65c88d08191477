"""`Worker`: runs episodes of one environment as concurrent tasks and answers for each with a checked result.

An episode never raises into the worker: a deadline, an exception of the environment, a failure of the gateway and a
malformed result all become the `error` of its reply. Measured cost on one core: see `docs/plugins/env.md`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

from prl import faults
from prl.envworker.context import EpisodeContext
from prl.envworker.tasks import TaskPages
from prl.errors import EpisodeFailed, WireError
from prl.messages import (
    CANCEL_EPISODE,
    LIST_TASKS,
    NOTHING,
    REPLY,
    RUN_EPISODE,
    CancelEpisode,
    EpisodeReply,
    EpisodeRequest,
    Nothing,
    ReplyRequest,
    TaskPage,
)
from prl.protocols import Env
from prl.types import Episode, EpisodeError, Message, Reward, Rollout, Task, Turn
from prl.wire import Client, Handlers

TRACEBACK_LINES = 12
"""How much of an environment's traceback travels with its error; all of it is in the worker's log."""

LOGGED_ERRORS = 20
"""Tracebacks of environment errors written to the log; later ones are only counted."""

LARGEST_REWARD = 1e18
"""In magnitude. Credit is float32 (at most 3e38) in the trainer, multiplied by ratios and squared in norms."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EpisodeReply).decode


class Worker:
    """Serves one environment. `in_flight` and `finished` go into heartbeats."""

    def __init__(self, label: str, env: Env, token: str) -> None:
        for method in ("tasks", "run"):
            if not callable(getattr(env, method, None)):
                raise TypeError(f"environment {label!r}: {type(env).__name__} has no method {method!r}")
        self.label = label
        self.env = env
        self.finished = 0
        self.errors = 0
        self._token = token
        self._log = logging.getLogger(f"env.{label}")
        self._tasks = TaskPages(env)
        self._listing = asyncio.Lock()
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._cancelled: set[int] = set()
        self._gateways: dict[str, Client] = {}
        self._muted_metrics: set[str] = set()

    @property
    def handlers(self) -> Handlers:
        return {RUN_EPISODE: self.run_episode, CANCEL_EPISODE: self.cancel_episode, LIST_TASKS: self.list_tasks}

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def list_tasks(self, peer: object, page: TaskPage) -> list[Task]:
        """In a thread, one page at a time: the first may load a data set."""
        self._check_label(page.env)
        async with self._listing:
            return await asyncio.to_thread(self._tasks.page, page.split, page.start, page.count)

    def cancel_episode(self, peer: object, request: CancelEpisode) -> Nothing:
        task = self._running.get(request.episode_id)
        if task is not None:
            self._cancelled.add(request.episode_id)
            task.cancel()
        return NOTHING

    async def run_episode(self, peer: object, request: EpisodeRequest) -> EpisodeReply:
        self._check_label(request.env)
        task = asyncio.current_task()
        assert task is not None
        started = time.monotonic()
        self._running[request.episode_id] = task
        try:
            reply = await self._attempt(request)
        except asyncio.CancelledError:
            if request.episode_id not in self._cancelled:
                raise
            task.uncancel()
            reply = _failed(request, "cancelled", "the controller cancelled this episode")
        finally:
            self._running.pop(request.episode_id, None)
            self._cancelled.discard(request.episode_id)
        self.finished += 1
        self.errors += reply.error is not None
        reply.seconds = time.monotonic() - started
        return reply

    async def _attempt(self, request: EpisodeRequest) -> EpisodeReply:
        gateway = self._gateway(request.gateway)

        async def ask(reply_request: ReplyRequest) -> Turn:
            return await gateway.call(REPLY, reply_request, timeout=None)

        context = EpisodeContext(request, ask, self._log)
        deadline = asyncio.timeout(request.deadline_s)
        try:
            faults.point("env.run")
            async with deadline:
                outcome = self.env.run(request.task, context)
                if not inspect.isawaitable(outcome):
                    raise TypeError(f"{type(self.env).__name__}.run must be `async def`")
                episode = await outcome
            if context.failure is not None:
                raise context.failure
            return self._checked(request, episode)
        except EpisodeFailed as error:
            return _failed(request, error.reason, str(error), error.retryable)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled the episode: the environment awaited something that it had cancelled itself.
            return self._env_error(request, error)
        except (Exception, SystemExit) as error:
            if deadline.expired():
                return _failed(request, "timeout", f"task {request.task.id!r} took more than {request.deadline_s:g} s")
            return self._env_error(request, error)

    def _env_error(self, request: EpisodeRequest, error: BaseException) -> EpisodeReply:
        lines = traceback.format_exception(error)
        if self.errors < LOGGED_ERRORS:
            self._log.error("task %r, attempt %d:\n%s", request.task.id, request.attempt + 1, "".join(lines).rstrip())
        tail = "\n".join("".join(lines).rstrip().splitlines()[-TRACEBACK_LINES:])
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        what = f"task {request.task.id!r}: {type(error).__name__}: {error}{where}"
        return _failed(request, "env_error", f"{what}\n{tail}")

    def _checked(self, request: EpisodeRequest, episode: object) -> EpisodeReply:
        """The reply of a finished episode.

        Raises:
            EpisodeFailed: it is not what an environment may return; "bad_reward" for a reward that is not finite.
        """
        if not isinstance(episode, Episode):
            returned = type(episode).__name__
            raise EpisodeFailed("bad_result", f"{type(self.env).__name__}.run returned {returned}, not prl.Episode")
        if episode.errors:
            return self._sendable(request, EpisodeReply(request.episode_id, error=episode.errors[0]))
        names = [getattr(rollout, "agent", None) for rollout in episode.rollouts]
        if not names or len(set(names)) != len(names):
            raise EpisodeFailed("bad_result", f"an episode needs one rollout per agent, this one has {names}")
        rollouts = [_checked_rollout(rollout) for rollout in episode.rollouts]
        return self._sendable(request, EpisodeReply(request.episode_id, rollouts, self._metrics(episode.metrics)))

    def _sendable(self, request: EpisodeRequest, reply: EpisodeReply) -> EpisodeReply:
        """Raises:
        EpisodeFailed: a field is of a wrong type, which is written as it is and refused only where it is read.
        """
        try:
            _decode(_encode(reply))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EpisodeFailed("bad_result", f"task {request.task.id!r} cannot be sent: {error}") from error
        return reply

    def _metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Finite numbers only. Others are left out, with one line in the log for each name."""
        kept: dict[str, float] = {}
        for name, value in metrics.items():
            number = _number(value)
            if number is not None:
                kept[str(name)] = number
            elif name not in self._muted_metrics:
                self._muted_metrics.add(name)
                self._log.warning("metric %r is %r, not a finite number: left out, also from now on", name, value)
        return kept

    def _check_label(self, env: str) -> None:
        if env != self.label:
            raise WireError(f"this worker runs {self.label!r}, not {env!r}")

    def _gateway(self, address: str) -> Client:
        client = self._gateways.get(address)
        if client is None or client.peer.closed:
            if client is not None:
                client.close()
            client = self._gateways[address] = Client(address, self._token, name=f"gateway {address}")
        return client

    async def close(self) -> None:
        """Leave the gateways, and give the environment's own `close`, if it has one, five seconds."""
        for client in self._gateways.values():
            client.close()
        close = getattr(self.env, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(5):
                result = close()
                if inspect.isawaitable(result):
                    await result
        except Exception as error:
            self._log.warning("closing the environment failed: %s: %s", type(error).__name__, error)


def _checked_rollout(rollout: object) -> Rollout:
    if not isinstance(rollout, Rollout):
        raise EpisodeFailed("bad_result", f"an episode's rollouts must be prl.Rollout, one is {type(rollout).__name__}")
    if not all(isinstance(message, Message) for message in rollout.messages):
        raise EpisodeFailed("bad_result", f"the messages of agent {rollout.agent!r} must be prl.Message")
    rollout.segments = []
    rollout.rewards = {str(name): _checked_reward(rollout, name, reward) for name, reward in rollout.rewards.items()}
    if abs(rollout.reward or 0.0) > LARGEST_REWARD:
        raise EpisodeFailed(
            "bad_reward",
            f"the reward of agent {rollout.agent!r} is {rollout.reward!r}: {LARGEST_REWARD:g} is the largest there is",
        )
    return rollout


def _checked_reward(rollout: Rollout, name: str, reward: Reward | None) -> Reward | None:
    if reward is None:
        return None
    if not isinstance(reward, Reward):
        raise EpisodeFailed("bad_reward", f"reward {name!r} of agent {rollout.agent!r} is {reward!r}, not a prl.Reward")
    score, weight = _number(reward.score), _number(reward.weight)
    if score is None or weight is None:
        raise EpisodeFailed(
            "bad_reward",
            f"reward {name!r} of agent {rollout.agent!r} is {reward.score!r} with weight {reward.weight!r}; "
            "both must be finite numbers",
        )
    return Reward(score, weight)


def _number(value: Any) -> float | None:
    """A plain finite float, also from numpy's scalars and bool; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _failed(request: EpisodeRequest, reason: str, message: str, retryable: bool = False) -> EpisodeReply:
    return EpisodeReply(request.episode_id, error=EpisodeError(reason, message, retryable))
