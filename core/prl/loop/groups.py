"""A group: the episodes of one task, from dispatch to training."""

from __future__ import annotations

import msgspec

from prl.types import Credit, Outcome, SampleHeader, Task


class Failure(msgspec.Struct, frozen=True):
    reason: str
    message: str = ""


class Sample(msgspec.Struct):
    """One trainable sample with its credit; `body` stays encoded. `episode_id` is its owner's."""

    episode_id: int
    header: SampleHeader
    credit: Credit
    body: bytes


class Group(msgspec.Struct):
    """State of one group. It is also what a checkpoint stores of it.

    Args:
        deadline: the last step that may train it (`schedule.deadline`).
        outcomes, failures: by member index; a member in neither is still running.
        samples: set once it was scored; those whose credit carries a signal.
    """

    id: int
    env: str
    task: Task
    size: int
    version: int
    deadline: int
    redraws: int = 0
    outcomes: dict[int, Outcome] = {}
    failures: dict[int, Failure] = {}
    samples: list[Sample] | None = None

    @property
    def complete(self) -> bool:
        return len(self.outcomes) + len(self.failures) == self.size

    @property
    def min_version(self) -> int:
        """Over the sampled tokens of every trainable sample; the admission version when there is none."""
        versions = [
            header.min_version
            for outcome in self.outcomes.values()
            for rollout in outcome.rollouts
            if rollout.trainable
            for header in rollout.samples
            if header.runs
        ]
        return min(versions, default=self.version)


def has_signal(header: SampleHeader, credit: Credit) -> bool:
    """Whether training on a sample could change anything. The policy loss acts on sampled tokens only."""
    rl = bool(header.runs) and any(value for _, value in credit.advantages) and any(value for _, value in credit.rl)
    return rl or any(value for _, value in credit.ce) or any(value for _, value in credit.ref_kl)
