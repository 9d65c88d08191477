"""Environment workers, the gateway and the trainer, as the loop sees them: the wire behind `prl.protocols`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prl.controller.hub import Connection, Hub
from prl.errors import EpisodeFailed, PrlError, RunFailed, WireError
from prl.messages import (
    CANCEL_EPISODE,
    CHECKPOINT,
    COLLECT,
    LIST_TASKS,
    PUBLISH,
    RELEASE,
    RUN_EPISODE,
    SNAPSHOT,
    TRAIN,
    CancelEpisode,
    CheckpointRequest,
    CollectedEpisode,
    CollectRequest,
    EpisodeReply,
    EpisodeRequest,
    PublishRequest,
    ReleaseRequest,
    SnapshotRequest,
    TaskPage,
    TrainBatch,
    TrainReport,
    WeightsRef,
)
from prl.planning import env_role
from prl.types import Outcome, Rollout, RolloutHeader, SampleHeader, Split, Task

GRACE_S = 15.0
"""A worker enforces an episode's deadline itself; past this much more it is taken for dead."""
RESTART_WAIT_S = 60.0
"""How long an episode waits for a worker that is being started again before it fails."""

_encode = msgspec.msgpack.Encoder().encode


class Collector:
    """Fetches finished conversations from the gateway, all those of one loop tick in one message."""

    def __init__(self, hub: Hub, timeout: float = 60.0) -> None:
        self._hub = hub
        self._timeout = timeout
        self._wanted: dict[int, asyncio.Future[CollectedEpisode]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def collect(self, episode_id: int) -> CollectedEpisode:
        """Raises:
        EpisodeFailed: the gateway is gone, or has nothing whole of this episode.
        """
        future: asyncio.Future[CollectedEpisode] = asyncio.get_running_loop().create_future()
        if not self._wanted:
            asyncio.get_running_loop().call_soon(self._flush)
        self._wanted[episode_id] = future
        collected = await future
        if collected.error is not None:
            raise EpisodeFailed(collected.error.reason, collected.error.message, retryable=collected.error.retryable)
        return collected

    def discard(self, episode_id: int) -> None:
        """The conversations of a failed or cancelled episode are of no use."""
        for gateway in self._hub.of("gateway"):
            gateway.peer.notify(COLLECT, CollectRequest([episode_id], discard=True))

    def _flush(self) -> None:
        wanted, self._wanted = self._wanted, {}
        task = asyncio.create_task(self._fetch(wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, wanted: dict[int, asyncio.Future[CollectedEpisode]]) -> None:
        try:
            gateways = self._hub.of("gateway")
            if not gateways:
                raise WireError("the gateway is gone")
            replies = await gateways[0].peer.call(COLLECT, CollectRequest(list(wanted)), timeout=self._timeout)
            for reply in replies:
                future = wanted.pop(reply.episode_id, None)
                if future is not None and not future.done():
                    future.set_result(reply)
            error = EpisodeFailed("not_collected", "the gateway knows nothing of this episode", retryable=True)
        except PrlError as lost:
            error = EpisodeFailed("gateway_lost", str(lost), retryable=True)
        for future in wanted.values():
            if not future.done():
                future.set_exception(error)


class WireRunner:
    """Episodes on environment workers, their tokens from the gateway."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._collector = Collector(hub)
        self._turn = itertools.count()

    async def tasks(self, env: str, split: Split, start: int, count: int) -> list[Task]:
        """Raises:
        RunFailed: the environment's worker cannot give its tasks.
        """
        role = env_role(env)
        workers = await self._hub.wait_for(role, 1, timeout=300)
        try:
            return await workers[0].peer.call(LIST_TASKS, TaskPage(env, split, start, count), timeout=300)
        except WireError as error:
            message = f"environment {env!r} cannot give its {split} tasks: {error}"
            raise RunFailed(message, log=f"logs/{role}-0.log") from error

    async def run(self, request: EpisodeRequest) -> Outcome:
        worker = await self._worker(request.env)
        answered = False
        try:
            reply = await worker.peer.call(RUN_EPISODE, request, timeout=request.deadline_s + GRACE_S)
            answered = True
            if reply.error is not None:
                raise EpisodeFailed(reply.error.reason, reply.error.message, retryable=reply.error.retryable)
            return outcome_of(reply, await self._collector.collect(request.episode_id))
        except BaseException as error:
            if not answered:
                with contextlib.suppress(WireError):
                    worker.peer.notify(CANCEL_EPISODE, CancelEpisode(request.episode_id))
            self._collector.discard(request.episode_id)
            if isinstance(error, WireError):
                raise EpisodeFailed("worker_lost", str(error), retryable=True) from error
            raise

    async def _worker(self, env: str) -> Connection:
        role = env_role(env)
        workers = self._hub.of(role)
        if not workers:
            try:
                workers = await self._hub.wait_for(role, 1, RESTART_WAIT_S)
            except RunFailed as error:
                raise EpisodeFailed("worker_lost", str(error), retryable=True) from error
        return workers[next(self._turn) % len(workers)]


def outcome_of(reply: EpisodeReply, collected: CollectedEpisode) -> Outcome:
    """Join what the environment said (rewards) with what the gateway holds (tokens), agent by agent."""
    by_agent = {rollout.agent: rollout for rollout in collected.rollouts}
    headers, bodies = [], []
    for rollout in reply.rollouts:
        tokens = by_agent.get(rollout.agent)
        headers.append(_header(rollout, tokens.headers if tokens else ()))
        if tokens:
            bodies.extend(tokens.bodies)
    transcript = _encode([rollout.messages for rollout in reply.rollouts])
    return Outcome(reply.episode_id, tuple(headers), bodies, reply.metrics, reply.seconds, transcript, collected.forks)


def _header(rollout: Rollout, samples: tuple[SampleHeader, ...]) -> RolloutHeader:
    return RolloutHeader(
        rollout.agent,
        rollout.trainable,
        rollout.reward,
        rollout.rewards,
        samples,
        rollout.truncated,
        rollout.stop_reason,
        rollout.num_turns,
    )


class WireTrainer:
    """The trainer's process group: one connection per rank, every collective call sent to all of them.

    Ranks that share the rows of another say so when they register, with `info["row_rank"]` above 0. Samples are sent to
    the others alone, which are the data-parallel ranks, in their order.
    """

    def __init__(self, ranks: Sequence[Connection]) -> None:
        self._ranks = sorted(ranks, key=lambda connection: connection.replica)
        leaders = [rank for rank in self._ranks if not rank.info.get("row_rank", 0)]
        self.dp_size = len(leaders)
        self._leaders = {rank.replica: index for index, rank in enumerate(leaders)}

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        assert len(batches) == self.dp_size, f"{len(batches)} batches for {self.dp_size} data-parallel ranks"
        empty = msgspec.structs.replace(batches[0], updates=[])
        sent = [
            batches[self._leaders[rank.replica]] if rank.replica in self._leaders else empty for rank in self._ranks
        ]
        calls = [rank.peer.call(TRAIN, batch, timeout=None) for rank, batch in zip(self._ranks, sent, strict=True)]
        return (await asyncio.gather(*calls))[0]

    async def publish(self, version: int) -> WeightsRef:
        calls = [rank.peer.call(PUBLISH, PublishRequest(version), timeout=None) for rank in self._ranks]
        return (await asyncio.gather(*calls))[0]

    async def release(self, versions: Sequence[int]) -> None:
        self._ranks[0].peer.notify(RELEASE, ReleaseRequest(list(versions)))

    async def snapshot(self, step: int) -> None:
        await asyncio.gather(*(rank.peer.call(SNAPSHOT, SnapshotRequest(step), timeout=None) for rank in self._ranks))

    async def checkpoint(self, step: int, path: Path) -> dict[str, str]:
        request = CheckpointRequest(step, str(path))
        calls = [rank.peer.call(CHECKPOINT, request, timeout=None) for rank in self._ranks]
        replies = await asyncio.gather(*calls)
        return {name: digest for reply in replies for name, digest in reply.files.items()}
