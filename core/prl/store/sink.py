"""Where the loop reports to, written to the run directory: `prl.loop.state.Sink` over a `StoreWriter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prl.store.records import RolloutRecord
from prl.store.writer import StoreWriter
from prl.types import Credit, Outcome, Task

if TYPE_CHECKING:
    from prl.loop.groups import Group, Sample


class RunSink:
    """The loop's sink. Every call returns at once; `ready` waits when the disk is behind. `last` holds the newest value
    of every metric.

    Raises:
        StoreError: from any call, once something could not be written.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self.last: dict[str, float] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.last.update(values)
        self._writer.metrics(step, values)

    def event(self, kind: str, **data: object) -> None:
        self._writer.event(kind, **data)

    def group(self, group: Group, step: int | None, fate: str) -> None:
        for record in group_records(group, step, fate):
            self._writer.rollout(step, record)

    def evaluated(self, step: int, env: str, episodes: Sequence[tuple[Task, Outcome]]) -> None:
        for task, outcome in episodes:
            self._writer.rollout(step, _eval_record(env, task, outcome))

    def seal(self, step: int) -> None:
        self._writer.seal(step)

    async def ready(self) -> None:
        await self._writer.ready()


def _eval_record(env: str, task: Task, outcome: Outcome) -> RolloutRecord:
    return RolloutRecord(
        outcome.episode_id,
        env,
        task.id,
        -1,
        "eval",
        "eval",
        outcome.rollouts,
        outcome.bodies,
        [],
        outcome.transcript,
        outcome.metrics,
        outcome.seconds,
    )


def group_records(group: Group, step: int | None, fate: str) -> Iterator[RolloutRecord]:
    """A record for every member. In a group that was trained, a member without any signal was not."""
    assigned: dict[int, list[Sample]] = {}
    for sample in group.samples or ():
        assigned.setdefault(sample.episode_id, []).append(sample)
    for _, outcome in sorted(group.outcomes.items()):
        own = assigned.get(outcome.episode_id, [])
        trained = step is not None and bool(own)
        yield RolloutRecord(
            outcome.episode_id,
            group.env,
            group.task.id,
            group.id,
            "train",
            "trained" if trained else "dropped",
            outcome.rollouts,
            outcome.bodies,
            _credits(outcome, own) if own else [],
            outcome.transcript,
            outcome.metrics,
            outcome.seconds,
            "" if trained else ("no_signal" if step is not None else fate),
        )
    for _, failure in sorted(group.failures.items()):
        reason = f"{failure.reason}: {failure.message}" if failure.message else failure.reason
        yield RolloutRecord(None, group.env, group.task.id, group.id, "train", "failed", error=reason)


def _credits(outcome: Outcome, samples: list[Sample]) -> list[Credit | None]:
    """The credit of every trainable sample, or None. `samples` are those with a signal, in the outcome's order."""
    remaining = iter(samples)
    wanted = next(remaining, None)
    bodies = iter(outcome.bodies)
    credits: list[Credit | None] = []
    for rollout in outcome.rollouts:
        for _, body in zip(rollout.samples, bodies):
            if not rollout.trainable:
                continue
            if wanted is not None and wanted.body == body:
                credits.append(wanted.credit)
                wanted = next(remaining, None)
            else:
                credits.append(None)
    return credits
