"""The loop's reports into the run directory, and to the hooks that observe them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prl.loop.groups import Group
from prl.store.records import RolloutRecord, Status
from prl.store.writer import StoreWriter


class StoreSink:
    """Hands records to the store's writer thread without opening them. `last` is the newest value of every metric."""

    def __init__(self, store: StoreWriter) -> None:
        self._store = store
        self.last: dict[str, float] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.last.update(values)
        self._store.metrics(step, values)

    def event(self, kind: str, **data: object) -> None:
        self._store.event(kind, **data)

    def group(self, group: Group, step: int | None, fate: str) -> None:
        for record in records(group, step, fate):
            self._store.rollout(step, record)

    def seal(self, step: int) -> None:
        self._store.seal(step)

    async def ready(self) -> None:
        await self._store.ready()


def records(group: Group, step: int | None, fate: str) -> Iterator[RolloutRecord]:
    """One record per finished or failed episode of a group that left the loop."""
    live = {sample.episode_id for sample in group.samples or ()}
    for index, outcome in sorted(group.outcomes.items()):
        status: Status = "trained"
        error = ""
        if step is None or outcome.episode_id not in live:
            status, error = "dropped", fate if step is None else "no_signal"
        yield RolloutRecord(
            outcome.episode_id,
            group.env,
            group.task.id,
            group.id,
            status=status,
            rollouts=outcome.rollouts,
            bodies=outcome.bodies,
            credits=group.credits.get(index, []),
            transcript=outcome.transcript,
            metrics=outcome.metrics,
            seconds=outcome.seconds,
            error=error,
        )
    for index, failure in sorted(group.failures.items()):
        yield RolloutRecord(
            group.id * group.size + index,
            group.env,
            group.task.id,
            group.id,
            status="failed",
            error=f"{failure.reason}: {failure.message}" if failure.message else failure.reason,
        )
