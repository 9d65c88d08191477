"""The generate loop.

Consumes: tasks. Waits for: room under the staleness bound and the limit of concurrency (`LoopState.admissible`).
Unblocked by: a batch being formed, new weights in the engines, a group that leaves, a limit that has grown. Produces:
finished groups, in `finished`.

Every episode is one asyncio task: it calls the environment worker and tries again when the failure was not its own.
"""

from __future__ import annotations

import asyncio

from prl.loop.episodes import request, stream, tried
from prl.loop.groups import Failure, Group
from prl.loop.state import LoopState
from prl.messages import EpisodeRequest
from prl.types import Outcome


class Generator:
    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Admit groups until every batch has its groups."""
        state = self._state
        for group in list(state.in_flight.values()):
            self._start(group)
        while not state.done:
            if self._error is not None:
                raise self._error
            state.open_round()
            if state.admissible > 0:
                await self._admit()
            else:
                with state.waits.on("generate", *self._blocker()):
                    await state.signal.wait()

    def stop(self) -> None:
        """Cancel the episodes in flight; they stay pending in the ledger, and in a checkpoint."""
        for group_id in list(self._state.episodes):
            self._state.cancel(group_id)

    async def _admit(self) -> None:
        state = self._state
        env, task, redraws = await state.tasks.draw()
        version = state.roles.fleet.version
        size = state.config.loop.group_size
        group = Group(state.next_group, env, task, size, version, state.deadline_of(version), redraws)
        state.next_group += 1
        state.round -= 1
        state.in_flight[group.id] = group
        state.ledger.dispatch(size)
        self._start(group)
        await state.sink.ready()

    def _start(self, group: Group) -> None:
        for index in range(group.size):
            if index not in group.outcomes and index not in group.failures:
                self._state.episodes_in_flight += 1
                task = asyncio.create_task(self._episode(group, index))
                self._state.episodes.setdefault(group.id, set()).add(task)

    async def _episode(self, group: Group, index: int) -> None:
        state = self._state
        try:
            outcome = await self._attempts(group, index)
            if isinstance(outcome, Outcome):
                group.outcomes[index] = outcome
                state.tokens_generated += sum(h.num_sampled for r in outcome.rollouts for h in r.samples)
            else:
                group.failures[index] = outcome
                state.ledger.fail(outcome.reason)
            state.count_result(outcome if isinstance(outcome, Failure) else None)
        except Exception as error:
            self._error = self._error or error
            state.signal.notify()
            return
        finally:
            state.episodes_in_flight -= 1
            state.episodes_completed += 1
        state.progress = asyncio.get_running_loop().time()
        if group.complete:
            del state.in_flight[group.id], state.episodes[group.id]
            state.finished.append(group)
            state.signal.notify()

    async def _attempts(self, group: Group, index: int) -> Outcome | Failure:
        """The outcome of one member, if it can be trained on."""
        result = await tried(self._state, lambda attempt: self._request(group, index, attempt))
        if isinstance(result, Failure):
            return result
        return unusable(result, self._state.config.trainer.row_tokens) or result

    def _request(self, group: Group, index: int, attempt: int) -> EpisodeRequest:
        state = self._state
        episode_id = state.next_episode
        state.next_episode += 1
        seed = stream(state.config.seed, "train", group.id, index, attempt)
        temperature = state.config.sampling.temperature
        return request(
            state, episode_id, group.env, group.task, seed=seed, temperature=temperature, kind="train", attempt=attempt
        )

    def _blocker(self) -> tuple[str, str]:
        state = self._state
        if state.paused:
            return "control", f"the run is paused: {state.paused}"
        if state.admission_closed:
            return "evaluate", "a synchronous evaluation is running"
        limit = state.concurrency_limit
        if limit is not None and state.room > 0 and state.episodes_in_flight + state.config.loop.group_size > limit:
            why = f"; {state.concurrency_reason}" if state.concurrency_reason else ""
            return "engine", (
                f"{state.episodes_in_flight} episodes in flight, and the most at once is {limit} "
                f"(loop.max_concurrency = {state.config.loop.max_concurrency!r}{why})"
            )
        if state.roles.fleet.version < state.batches:
            owner = "publish" if state.roles.fleet.version < state.version else "train"
        else:
            owner = "batch"
        return owner, (
            f"{state.outstanding} groups outstanding, {state.batches} batches formed, engines at version "
            f"{state.roles.fleet.version}: no room within max_staleness = {state.config.loop.max_staleness}"
        )


def unusable(outcome: Outcome, row_tokens: int) -> Failure | None:
    """Why a finished episode cannot be trained on: it was not scored, or does not fit into a micro-batch."""
    for rollout in outcome.rollouts:
        if not rollout.trainable:
            continue
        if rollout.reward is None:
            return Failure("unscored", f"agent {rollout.agent!r} has no reward")
        longest = max((header.num_tokens for header in rollout.samples), default=0)
        if longest > row_tokens:
            return Failure("too_long", f"a sample of {longest} tokens, and trainer.row_tokens = {row_tokens}")
    return None
