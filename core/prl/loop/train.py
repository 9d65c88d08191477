"""The train loop.

Consumes: `formed` batches. Waits for: one, and for the trainer. Unblocked by: the batch loop, and the trainer's report.
Produces: policy versions, and references to their weights in `refs`. At a checkpoint it takes the snapshot between two
steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from prl.errors import RunFailed
from prl.loop.groups import Group
from prl.loop.mismatch import check_mismatch
from prl.loop.state import Batch, LoopState
from prl.loop.waits import within
from prl.messages import TrainReport


class Trainer:
    """`checkpoint(step)` saves the run; `on_step(step)` runs after every step (evaluation schedule)."""

    def __init__(
        self,
        state: LoopState,
        checkpoint: Callable[[int], Awaitable[None]],
        on_step: Callable[[int], None],
    ) -> None:
        self._state = state
        self._checkpoint = checkpoint
        self._on_step = on_step
        self._last = 0.0

    async def run(self) -> None:
        state = self._state
        self._last = asyncio.get_running_loop().time()
        while state.version < state.steps and not state.stopping:
            if state.checkpoint_requested:
                state.checkpoint_requested = False
                await self._checkpoint(state.version)
            elif state.formed and not state.paused:
                await self._step(state.formed.popleft())
            else:
                with state.waits.on("train", *self._blocker()):
                    await state.signal.wait()
        state.signal.notify()

    async def _step(self, batch: Batch) -> None:
        state = self._state
        self._check(batch)
        state.training = batch
        state.signal.notify()
        loop = asyncio.get_running_loop()
        timeout = state.config.loop.step_timeout_s
        if state.config.engine.sleep:
            with state.waits.on("train", "engine", "it frees its GPU's memory", timeout):
                await within(state.roles.fleet.sleep(), timeout, "putting the engines to sleep", "engine")
        started = loop.time()
        for message in batch.messages:  # it may have come into force since the batch was formed
            message.correction = state.correction
        with state.waits.on("train", "trainer", f"step {batch.step}", timeout):
            training = state.roles.trainer.train(batch.messages)
            report = await within(training, timeout, f"training step {batch.step}", "trainer")
            trained = loop.time()
            publishing = state.roles.trainer.publish(batch.step)
            ref = await within(publishing, timeout, f"publishing version {batch.step}", "trainer")
        if report.step != batch.step or report.incarnation != state.incarnation:
            raise RunFailed(
                f"the trainer reported step {report.step} of incarnation {report.incarnation}, not {batch.step}"
            )
        state.version = batch.step
        state.training = None
        self._settle(batch, report, started, trained)
        check_mismatch(state, report)
        if self._checkpoint_due():
            state.checkpoint_requested = False
            await self._checkpoint(state.version)
        state.refs.append(ref)
        state.progress = loop.time()
        self._on_step(batch.step)
        state.signal.notify()
        await state.sink.ready()

    def _blocker(self) -> tuple[str, str]:
        if self._state.paused:
            return "control", f"the run is paused: {self._state.paused}"
        return "batch", "no batch is formed"

    def _check(self, batch: Batch) -> None:
        """The guarantee, once more, on what is really sent."""
        state = self._state
        oldest = min((s.header.min_version for s in batch.samples if s.header.runs), default=batch.step - 1)
        staleness = batch.step - 1 - oldest
        assert staleness <= state.config.loop.max_staleness, f"a sample of staleness {staleness} in batch {batch.step}"
        assert batch.step == state.version + 1, f"batch {batch.step} after version {state.version}"

    def _checkpoint_due(self) -> bool:
        state = self._state
        every = state.config.checkpoint.every
        scheduled = every > 0 and state.version % every == 0 and state.version < state.steps
        return scheduled or state.checkpoint_requested

    def _settle(self, batch: Batch, report: TrainReport, started: float, trained: float) -> None:
        """Book a finished step: ledger, counters, metrics, rollouts."""
        state = self._state
        live = {sample.episode_id for sample in batch.samples}
        for group in batch.groups:
            used = sum(outcome.episode_id in live for outcome in group.outcomes.values())
            state.ledger.train(used)
            state.ledger.drop("no_signal", len(group.outcomes) - used)
            state.sink.group(group, batch.step, "trained")
        staleness = [batch.step - 1 - s.header.min_version for s in batch.samples if s.header.runs]
        state.tokens_trained += sum(sample.header.num_sampled for sample in batch.samples)
        state.staleness_sum += sum(staleness)
        state.staleness_count += len(staleness)
        state.staleness_max = max(state.staleness_max, max(staleness, default=0))
        now = asyncio.get_running_loop().time()
        values = dict(report.metrics)
        values.update(group_metrics(batch.groups))
        values.update(
            {
                "time/step": now - self._last,
                "time/train": trained - started,
                "time/publish": now - trained,
                "time/wait_for_batch": started - self._last,
                "staleness/mean": sum(staleness) / max(1, len(staleness)),
                "staleness/max": max(staleness, default=0),
                "batch/samples": len(batch.samples),
                "batch/tokens": batch.num_tokens,
                "loop/in_flight": len(state.in_flight),
                "loop/episodes_in_flight": state.episodes_in_flight,
                "loop/ready": len(state.ready),
                "loop/engine_version": state.roles.fleet.version,
            }
        )
        if state.concurrency is not None:
            values["loop/concurrency_limit"] = state.concurrency
        values.update({f"ledger/{key}": _total(value) for key, value in state.ledger.counts().items()})
        self._last = now
        state.sink.metrics(batch.step, values)
        state.sink.seal(batch.step)


def _total(count: int | Mapping[str, int]) -> int:
    return count if isinstance(count, int) else sum(count.values())


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over the episodes of a batch: reward, length, truncation, and whatever the environments measured."""
    sums: dict[str, tuple[float, int]] = {}

    def add(name: str, value: float) -> None:
        total, count = sums.get(name, (0.0, 0))
        sums[name] = (total + value, count + 1)

    for group in groups:
        for index in sorted(group.outcomes):  # not in the order they came in: a sum of floats depends on its order
            outcome = group.outcomes[index]
            for rollout in outcome.rollouts:
                if rollout.reward is not None:
                    add("reward/mean", rollout.reward)
                    add(f"reward/{group.env}", rollout.reward)
                add("rollout/sampled_tokens", sum(header.num_sampled for header in rollout.samples))
                add("rollout/turns", rollout.num_turns)
                add("rollout/truncated", float(rollout.truncated))
            add("rollout/forks", outcome.forks)
            for name, value in outcome.metrics.items():
                add(f"env/{group.env}/{name}", value)
    return {name: total / count for name, (total, count) in sums.items()}
