"""The gateway's handlers, and the life of its conversations: from an episode's first turn until it is collected."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prl import faults, keys
from prl.errors import EpisodeFailed
from prl.messages import (
    COLLECT,
    NOTHING,
    REPLY,
    SET_ENGINES,
    CollectedEpisode,
    CollectedRollout,
    CollectRequest,
    EngineSet,
    GenerateRequest,
    Nothing,
    ReplyRequest,
)
from prl.types import EpisodeError, Turn
from prl.wire import Handlers
from prl_gateway.conversation import Conversation
from prl_gateway.render import Renderer
from prl_gateway.router import Connect, Router, check

log = logging.getLogger(__name__)

GRACE_S = 120.0
"""How long after an episode's deadline the controller may still collect it."""


class OpenEpisode:
    """The conversations of one episode, by agent. `expires` is in the loop's time."""

    __slots__ = ("conversations", "dropped", "error", "expires", "tasks")

    def __init__(self) -> None:
        self.conversations: dict[str, Conversation] = {}
        self.dropped = False
        self.expires = 0.0
        self.error: EpisodeError | None = None
        self.tasks: set[asyncio.Task[Any]] = set()


class Gateway:
    """Must be made inside a running event loop.

    Args:
        token: the run's token, which episode keys are checked with.
        context: the longest sequence of the model, None when unknown.
    """

    def __init__(self, token: str, renderer: Renderer, connect: Connect, *, context: int | None = None) -> None:
        self.router = Router(connect)
        self.forks = 0
        self.turns = 0
        self._token = token
        self._renderer = renderer
        self._context = context
        self._episodes: dict[int, OpenEpisode] = {}
        self._loop = asyncio.get_running_loop()
        self._serial = 0

    def worker_handlers(self) -> Handlers:
        """What environment workers may ask."""
        return {REPLY: self.reply}

    def controller_handlers(self) -> Handlers:
        """What the controller may ask."""
        return {SET_ENGINES: self.set_engines, COLLECT: self.collect}

    def gauges(self) -> dict[str, float]:
        return {
            "episodes": float(len(self._episodes)),
            "in_flight": float(self.router.in_flight),
            "engines": float(self.router.serving),
            "turns": float(self.turns),
            "forks": float(self.forks),
            "retries": float(self.router.retries),
        }

    # --- an environment's turn --------------------------------------------------------------------------------

    async def reply(self, peer: object, request: ReplyRequest) -> Turn:
        """Continue a conversation by one sampled turn.

        Raises:
            EpisodeFailed: a wrong key, a conversation that is not there, a full context, a passed deadline, or a turn
                that cannot be used. The conversation stays as it was.
        """
        episode_id = keys.verify(self._token, request.key)
        faults.point("gateway.reply")
        episode = self._episodes.get(episode_id)
        if episode is None:
            episode = self._episodes[episode_id] = OpenEpisode()
        episode.expires = self._loop.time() + request.deadline_s + GRACE_S
        conversation = episode.conversations.get(request.agent)
        if conversation is None:
            conversation = episode.conversations[request.agent] = Conversation()
        if conversation.waiting:
            raise EpisodeFailed("bad_request", f"agent {request.agent!r} asks for a turn while one is being sampled")
        task = asyncio.current_task()
        assert task is not None
        conversation.waiting = True
        episode.tasks.add(task)
        try:
            return await self._turn(conversation, request, episode_id)
        except EpisodeFailed as error:
            episode.error = EpisodeError(error.reason, str(error), error.retryable)
            raise
        except asyncio.CancelledError:
            if not episode.dropped:
                raise
            raise EpisodeFailed("cancelled", f"episode {episode_id} was ended while a turn was sampled") from None
        finally:
            conversation.waiting = False
            episode.tasks.discard(task)

    async def _turn(self, conversation: Conversation, request: ReplyRequest, episode_id: int) -> Turn:
        sampling = request.sampling
        pending = conversation.prepare(request.keep, request.messages, sampling, self._renderer, request.tools)
        if self._context is not None and len(pending.prompt_ids) >= self._context:
            raise EpisodeFailed(
                "context_full",
                f"the conversation has {len(pending.prompt_ids)} tokens and the model can hold {self._context}",
            )
        self._serial += 1
        generate = GenerateRequest(
            id=f"{episode_id}.{self._serial}",
            token_ids=pending.prompt_ids,
            sampling=sampling,
            stop_token_ids=self._renderer.stop_token_ids,
            seed=request.seed,
            deadline_s=request.deadline_s,
            session=f"{episode_id}.{request.agent}",
        )
        try:
            async with asyncio.timeout(request.deadline_s):
                generation = await self.router.generate(conversation, generate)
        except TimeoutError:
            raise EpisodeFailed(
                "deadline", f"no engine answered within {request.deadline_s:.3g} s ({self.router.serving} are serving)"
            ) from None
        check(generation)
        before = conversation.forks
        turn = conversation.commit(pending, generation, self._renderer)
        self.turns += 1
        self.forks += conversation.forks - before
        return turn

    # --- the controller ---------------------------------------------------------------------------------------

    def set_engines(self, peer: object, request: EngineSet) -> Nothing:
        self.router.set(request.engines)
        return NOTHING

    def collect(self, peer: object, request: CollectRequest) -> list[CollectedEpisode]:
        """Hand over and forget. A turn that is still being sampled for one of them is aborted."""
        collected = []
        for episode_id in request.episode_ids:
            episode = self._episodes.pop(episode_id, None)
            if episode is not None:
                _drop(episode)
            if not request.discard:
                collected.append(_collected(episode_id, episode))
        return collected

    def expire(self) -> int:
        """Forget episodes that nobody collected in time; how many."""
        now = self._loop.time()
        late = [episode_id for episode_id, episode in self._episodes.items() if episode.expires < now]
        for episode_id in late:
            _drop(self._episodes.pop(episode_id))
        if late:
            log.warning("%d episodes were never collected, episode %d for one: forgotten", len(late), late[0])
        return len(late)

    async def close(self) -> None:
        await self.router.close()


def _drop(episode: OpenEpisode) -> None:
    episode.dropped = True
    for task in episode.tasks:
        task.cancel()


def _collected(episode_id: int, episode: OpenEpisode | None) -> CollectedEpisode:
    if episode is None:
        error = EpisodeError("not_held", f"the gateway holds no conversation of episode {episode_id}", True)
        return CollectedEpisode(episode_id, [], 0, error)
    rollouts = [
        CollectedRollout(
            agent,
            tuple(segment.header() for segment in conversation.segments),
            [segment.body() for segment in conversation.segments],
        )
        for agent, conversation in episode.conversations.items()
    ]
    forks = sum(conversation.forks for conversation in episode.conversations.values())
    return CollectedEpisode(episode_id, rollouts, forks, episode.error)
