"""The controller's part of a checkpoint: everything that makes a resumed run continue where this one stood.

Finished work (ready groups, and batches formed but not trained) keeps its samples; groups in flight keep the members
that are done, and the others start again. At `max_staleness = 0` nothing is outstanding between two steps, so a resumed
run is the uninterrupted one bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from prl.errors import StoreError
from prl.loop.groups import Group
from prl.loop.ledger import Ledger
from prl.loop.state import LoopState
from prl.loop.tasks import TaskSourceState
from prl.types import SCHEMA_VERSION

FILE = "state.msgpack"


class Snapshot(msgspec.Struct):
    schema: int
    step: int
    next_group: int
    ready: list[Group]
    in_flight: list[Group]
    ledger: dict[str, Any]
    tasks: TaskSourceState
    algorithm: dict[str, Any]
    counters: dict[str, float]
    eval_first: float | None
    eval_last: float | None
    correcting: bool = False


COUNTERS = (
    "next_episode",
    "tokens_generated",
    "tokens_trained",
    "staleness_sum",
    "staleness_count",
    "staleness_max",
    "mismatch_sum",
    "mismatch_tokens",
)


def take(state: LoopState, eval_first: float | None, eval_last: float | None) -> bytes:
    """Encode the state between two steps. Synchronous: nothing moves meanwhile."""
    assert state.training is None, "a snapshot in the middle of a step"
    formed = [group for batch in state.formed for group in batch.groups]
    return msgspec.msgpack.encode(
        Snapshot(
            schema=SCHEMA_VERSION,
            step=state.version,
            next_group=state.next_group,
            ready=[*formed, *state.ready.values()],
            in_flight=[*state.finished, *state.in_flight.values()],
            ledger=state.ledger.counts(),
            tasks=state.tasks.state(),
            algorithm=state.algorithm.state(),
            counters={name: getattr(state, name) for name in COUNTERS},
            eval_first=eval_first,
            eval_last=eval_last,
            correcting=state.correcting,
        )
    )


def _restore_running(state: LoopState, group: Group) -> None:
    """A group that was in flight, under the configuration of today: the bound may be another one now, and the group's
    environment may be gone."""
    if not group.outcomes:
        group.version = state.version  # all of it is sampled again
    group.deadline = state.deadline_of(group.min_version)
    if group.complete:
        state.finished.append(group)
    elif group.env in {env.label for env in state.config.envs}:
        state.in_flight[group.id] = group
    else:
        state.ledger.drop("environment_removed", group.size - len(group.failures))
        state.sink.group(group, None, "environment_removed")


def restore(state: LoopState, data: bytes) -> Snapshot:
    """Put a snapshot back into a fresh state.

    Raises:
        StoreError: it is not a snapshot, or a newer prl wrote it.
    """
    snapshot = _read(data)
    state.version = state.batches = snapshot.step
    state.next_group = snapshot.next_group
    state.ledger = Ledger.from_counts(snapshot.ledger)
    state.tasks.load_state(snapshot.tasks)
    for group in snapshot.ready:
        group.deadline = state.deadline_of(group.min_version)  # `max_staleness` may be another one now
        state.ready[group.id] = group
    for group in snapshot.in_flight:
        _restore_running(state, group)
    state.algorithm.load_state(snapshot.algorithm)
    state.correcting = snapshot.correcting
    for name, value in snapshot.counters.items():
        setattr(state, name, type(getattr(state, name))(value))
    return snapshot


def settled(data: bytes) -> Callable[[int], bool]:
    """Which groups had left the loop when the snapshot was taken: they are in its ledger, and not started again.

    Raises:
        StoreError: as `restore`.
    """
    snapshot = _read(data)
    outstanding = {group.id for group in (*snapshot.ready, *snapshot.in_flight)}
    return lambda group: 0 <= group < snapshot.next_group and group not in outstanding


def _read(data: bytes) -> Snapshot:
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StoreError(f"the controller's part of the checkpoint cannot be read: {error}") from error
    if snapshot.schema > SCHEMA_VERSION:
        raise StoreError(f"the checkpoint has schema {snapshot.schema}, this prl knows {SCHEMA_VERSION}: upgrade prl")
    return snapshot
