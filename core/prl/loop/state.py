"""What the five loops share. Each field has one writer, named beside it; everyone may read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prl.config.schema import RunConfig
from prl.errors import RunFailed
from prl.loop.groups import Failure, Group, Sample
from prl.loop.ledger import Ledger
from prl.loop.schedule import deadline, room
from prl.loop.tasks import TaskSource
from prl.loop.waits import Signal, Waits
from prl.messages import Correction, TrainBatch, WeightsRef
from prl.protocols import Algorithm, EngineFleet, EpisodeRunner, TrainerClient
from prl.types import Outcome, Task


class Sink(Protocol):
    """Where the loop reports. Calls return at once; `ready` is awaited by whoever would outrun the disk."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def event(self, kind: str, **data: object) -> None: ...

    def group(self, group: Group, step: int | None, fate: str) -> None:
        """A group left the loop: trained at `step`, or dropped or failed for the reason `fate`."""
        ...

    def evaluated(self, step: int, env: str, episodes: Sequence[tuple[Task, Outcome]]) -> None: ...

    def seal(self, step: int) -> None: ...

    async def ready(self) -> None: ...


@dataclass
class Roles:
    """The other processes as the loop sees them; fakes in tests, the wire in a run."""

    runner: EpisodeRunner
    trainer: TrainerClient
    fleet: EngineFleet
    gateway: str = ""
    token: str = ""


@dataclass
class Batch:
    """A formed batch: one `TrainBatch` per data-parallel rank, and the groups it was made of."""

    step: int
    groups: list[Group]
    samples: list[Sample]
    messages: list[TrainBatch]
    num_tokens: int


@dataclass(frozen=True)
class Taken:
    """A checkpoint on its way: the controller's part, while the trainer holds its own."""

    step: int
    data: bytes


@dataclass
class LoopState:
    """The shared state of one run's loops."""

    config: RunConfig
    roles: Roles
    algorithm: Algorithm
    tasks: TaskSource
    sink: Sink
    run_id: str
    incarnation: int = 0

    ledger: Ledger = field(default_factory=Ledger)
    signal: Signal = field(default_factory=Signal)
    waits: Waits = field(default_factory=Waits)

    next_group: int = 0  # generate
    next_episode: int = 0  # generate: every attempt has a number of its own
    round: int = 0  # generate: groups that may still join those in flight, in a synchronous run
    in_flight: dict[int, Group] = field(default_factory=dict)  # generate; batch gives up stragglers
    episodes: dict[int, set[asyncio.Task[None]]] = field(default_factory=dict)  # generate: by group in flight
    finished: deque[Group] = field(default_factory=deque)  # generate adds, score removes
    ready: dict[int, Group] = field(default_factory=dict)  # score adds, batch removes
    formed: deque[Batch] = field(default_factory=deque)  # batch adds, train removes
    refs: deque[WeightsRef] = field(default_factory=deque)  # train adds, publish removes

    batches: int = 0  # batch: batches formed so far; batch b trains version b-1 into b
    version: int = 0  # train: the trainer's policy version = steps done
    training: Batch | None = None  # train
    taken: Taken | None = None  # train sets, save clears when the checkpoint is complete
    barren: int = 0  # groups in a row that brought nothing to train; batch sets it back
    admission_closed: bool = False  # publish, while a synchronous evaluation runs
    paused: str = ""  # control, mismatch gate: why nothing new is started or trained; empty while the run goes on
    mismatch_sum: float = 0.0  # mismatch gate: KL times tokens, and tokens, that it has not judged yet
    mismatch_tokens: float = 0.0
    correcting: bool = False  # mismatch gate: the correction is in force although it was not from the start
    stopping: bool = False  # control: finish the step in progress, save, end
    checkpoint_requested: bool = False  # control sets, train clears
    evaluate_requested: bool = False  # control sets, evaluate clears
    episodes_in_flight: int = 0  # generate
    episodes_completed: int = 0  # generate: attempts and all, since this process started
    concurrency: int | None = None  # pace: the adaptive limit of episodes in flight, None while there is none
    concurrency_reason: str = ""  # pace: why it last fell
    recent: deque[bool] = field(default_factory=deque)  # generate: whether recent episodes failed
    progress: float = 0.0  # whoever moved something: loop time

    tokens_generated: int = 0  # sampled by the policy in training episodes
    tokens_trained: int = 0  # those of them that were in a trained sample
    staleness_sum: float = 0.0
    staleness_count: int = 0
    staleness_max: int = 0

    @property
    def steps(self) -> int:
        return self.config.loop.steps

    @property
    def done(self) -> bool:
        """Every step is trained, or a stop was asked for and the step in progress is over."""
        return self.version >= self.steps or (self.stopping and self.training is None)

    @property
    def outstanding(self) -> int:
        """Groups admitted and not yet part of a batch."""
        return len(self.in_flight) + len(self.finished) + len(self.ready)

    @property
    def room(self) -> int:
        """How many groups fit beside those outstanding."""
        loop = self.config.loop
        version = self.roles.fleet.version
        return room(self.outstanding, self.batches, self.steps, version, loop.groups_per_step, loop.max_staleness)

    def open_round(self) -> None:
        """A synchronous run replaces groups that brought nothing only after all of their round have ended: which
        tasks are drawn, and in which order, must not depend on which of them was the fastest."""
        if self.round <= 0 and not self.in_flight and not self.finished:
            self.round = self.room
            self.tasks.release()

    @property
    def concurrency_limit(self) -> int | None:
        """Episodes that may be in flight at once; None leaves it to staleness."""
        configured = self.config.loop.max_concurrency
        return self.concurrency if configured == "auto" else configured or None

    @property
    def admissible(self) -> int:
        """How many groups may be admitted now."""
        loop = self.config.loop
        if self.paused or self.stopping or self.admission_closed:
            return 0
        free = self.room if loop.max_staleness else min(self.room, self.round)
        limit = self.concurrency_limit
        if limit is not None:
            spare = (limit - self.episodes_in_flight) // loop.group_size
            # One group always fits, or a limit below the group size would stop everything.
            free = min(free, max(spare, 0 if self.episodes_in_flight else 1))
        return free

    @property
    def correction(self) -> Correction:
        """What the trainer does, from its next batch on, about tokens of which the engine has another probability."""
        table = self.config.mismatch
        in_force = self.correcting or table.action != "correct"
        return Correction(table.correction, table.band) if in_force else Correction()

    def deadline_of(self, version: int) -> int:
        return deadline(version, self.config.loop.max_staleness)

    def cancel(self, group_id: int) -> None:
        """Stop the episodes of a group in flight; what becomes of them in the ledger is the caller's to say."""
        for task in self.episodes.pop(group_id, ()):
            task.cancel()

    def discard(self, group: Group, reason: str, *, redraw: bool) -> None:
        """A scored or finished group leaves without being trained: its good episodes are dropped for `reason`."""
        self.ledger.drop(reason, len(group.outcomes))
        self.sink.group(group, None, reason)
        if redraw and group.redraws < self.config.loop.max_redraws:
            hold = self.config.loop.max_staleness == 0
            self.tasks.put_back(group.id, group.env, group.task, group.redraws + 1, hold=hold)
        self.signal.notify()

    def _hint(self) -> str:
        """What to do about failures that a setting of the run is to blame for."""
        if not self.ledger.failed["too_long"]:
            return ""
        return (
            " (too_long: samples have more tokens than trainer.row_tokens = "
            f"{self.config.trainer.row_tokens}; raise it, or lower sampling.max_tokens)"
        )

    def count_barren(self, groups: int) -> None:
        """Watch for a run that goes on without training anything.

        Raises:
            RunFailed: so many groups in a row as make up `loop.max_empty_batches` batches brought no signal.
        """
        loop = self.config.loop
        self.barren += groups
        if self.barren >= loop.max_empty_batches * loop.groups_per_step:
            dropped = ", ".join(f"{reason} {count}" for reason, count in self.ledger.dropped.most_common(3))
            raise RunFailed(
                f"{self.barren} groups in a row, {loop.max_empty_batches} batches in a row (limit "
                f"loop.max_empty_batches), carried no signal; episodes dropped so far: {dropped}{self._hint()}. "
                "With no_signal, all rewards within every group were equal: the tasks are too hard or too easy for "
                "this model, or the reward function returns a constant. With incomplete_group, too many episodes failed"
            )

    def count_result(self, failure: Failure | None) -> None:
        """Watch the share of failures over the last `failure_window` episodes.

        Raises:
            RunFailed: it is past `loop.max_failure_share`.
        """
        loop = self.config.loop
        self.recent.append(failure is not None)
        if len(self.recent) > loop.failure_window:
            self.recent.popleft()
        if failure is None or len(self.recent) < loop.failure_window:
            return
        share = sum(self.recent) / len(self.recent)
        if share > loop.max_failure_share:
            worst = ", ".join(f"{reason} {count}" for reason, count in self.ledger.failed.most_common(3))
            raise RunFailed(
                f"{share:.0%} of the last {len(self.recent)} episodes failed (limit loop.max_failure_share = "
                f"{loop.max_failure_share:.0%}); failures so far: {worst}{self._hint()}{_latest(failure)}. The logs of "
                "the environment workers and of the gateway show more"
            )


def _latest(failure: Failure) -> str:
    """The first line of what was wrong with an episode, for a message about many."""
    line = failure.message.partition("\n")[0]
    return f"; the latest: {failure.reason}: {line[:300]}" if line else ""
