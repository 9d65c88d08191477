"""What an environment is given for one episode: `EpisodeContext`, and the `GatewayAgent`s it hands out."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from prl.env import stable_seed
from prl.errors import EpisodeFailed, WireError
from prl.messages import EpisodeRequest, ReplyRequest
from prl.types import Message, Reward, Rollout, StopReason, Turn, as_messages

Gateway = Callable[[ReplyRequest], Awaitable[Turn]]
"""Sends a reply request to one gateway."""


class GatewayAgent:
    """One seat, played by the model behind the gateway.

    `messages` is the history and may be edited between turns. A turn sends only what differs from what the
    gateway has: an untouched history keeps the exact tokens, an edited one starts another segment.
    """

    def __init__(self, context: EpisodeContext, name: str, trainable: bool) -> None:
        self.name = name
        self.trainable = trainable
        self.messages: list[Message] = []
        self._context = context
        self._known: list[Message] = []
        self._turns = 0
        self._truncated = False
        self._stop_reason: StopReason = "stop"
        self._waiting = False

    async def reply(
        self,
        messages: str | Message | Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """See `prl.protocols.Agent.reply`."""
        if self._waiting:
            raise RuntimeError(f"agent {self.name!r} is asked for a reply while it still makes one")
        self.messages.extend(as_messages(messages))
        if not self.messages:
            raise ValueError(f"agent {self.name!r} is asked for a reply to an empty conversation")
        self._waiting = True
        try:
            turn = await self._context.ask(self._request(tools, max_tokens))
        finally:
            self._waiting = False
        self.messages.append(turn.message)
        self._known = list(self.messages)
        self._turns += 1
        self._stop_reason = turn.stop_reason
        self._truncated |= turn.stop_reason == "length"
        return turn

    def finish(self, rewards: float | Mapping[str, float | Reward | None]) -> Rollout:
        """See `prl.protocols.Agent.finish`."""
        given = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
        return Rollout(
            agent=self.name,
            trainable=self.trainable,
            messages=list(self.messages),
            rewards={
                name: value if value is None or isinstance(value, Reward) else Reward(float(value))
                for name, value in given.items()
            },
            truncated=self._truncated,
            stop_reason=self._stop_reason,
            num_turns=self._turns,
        )

    def _request(self, tools: Sequence[Mapping[str, Any]], max_tokens: int | None) -> ReplyRequest:
        keep = 0
        for known, message in zip(self._known, self.messages, strict=False):
            if known is not message:
                break
            keep += 1
        episode = self._context.request
        sampling = episode.sampling
        if max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        return ReplyRequest(
            key=episode.key,
            agent=self.name,
            keep=keep,
            messages=tuple(self.messages[keep:]),
            sampling=sampling,
            seed=stable_seed(episode.seed, self.name, self._turns),
            deadline_s=self._context.remaining(),
            tools=tuple(dict(tool) for tool in tools),
        )


class EpisodeContext:
    """All that an environment may use (`prl.protocols.Context`)."""

    def __init__(self, request: EpisodeRequest, gateway: Gateway, log: logging.Logger) -> None:
        self.request = request
        self.log = log
        self.kind = request.kind
        self.deadline = time.monotonic() + request.deadline_s
        self.failure: EpisodeFailed | None = None
        self._gateway = gateway
        self._agents: dict[str, GatewayAgent] = {}
        self._rng: random.Random | None = None

    @property
    def rng(self) -> random.Random:
        """Seeded by the episode; made when first used, since seeding costs 10 us."""
        if self._rng is None:
            self._rng = random.Random(self.request.seed)
        return self._rng

    @rng.setter
    def rng(self, value: random.Random) -> None:
        self._rng = value

    def agent(self, name: str = "policy", *, trainable: bool = True) -> GatewayAgent:
        """The seat called `name`; the same object when asked again."""
        agent = self._agents.get(name)
        if agent is None:
            agent = self._agents[name] = GatewayAgent(self, name, trainable)
        return agent

    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    async def ask(self, request: ReplyRequest) -> Turn:
        """One turn from the gateway. The first failure is kept: an environment that swallows it still fails."""
        try:
            return await self._gateway(request)
        except EpisodeFailed as error:
            self.failure = self.failure or error
            raise
        except WireError as error:
            self.failure = self.failure or EpisodeFailed("gateway_lost", str(error), retryable=True)
            raise self.failure from error
