"""The score loop.

Consumes: `finished` groups. Waits for: one. Unblocked by: the last episode of a group. Produces: `ready` groups whose
samples have their credit; groups with too few scored members are dropped and their task drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence

from prl.errors import RunFailed
from prl.loop.groups import Group, Sample, has_signal
from prl.loop.state import LoopState
from prl.protocols import GroupMember
from prl.types import Credit, Outcome


class Scorer:
    def __init__(self, state: LoopState) -> None:
        self._state = state

    async def run(self) -> None:
        state = self._state
        while not state.done:
            if state.finished:
                self._score(state.finished.popleft())
                state.signal.notify()
            else:
                with state.waits.on("score", "generate", f"{len(state.in_flight)} groups in flight, none complete"):
                    await state.signal.wait()

    def _score(self, group: Group) -> None:
        state = self._state
        if len(group.outcomes) < max(1, min(state.algorithm.min_members, group.size)):
            state.discard(group, "incomplete_group", redraw=True)
            state.count_barren(1)
            return
        outcomes = [group.outcomes[index] for index in sorted(group.outcomes)]
        credits = state.algorithm.credit([GroupMember(o.episode_id, o.rollouts, o.metrics) for o in outcomes])
        group.samples = attach(outcomes, credits)
        # The versions are known now. They are those of admission or newer; were one older (an engine that missed an
        # update), the group must not be trained too late for that.
        group.deadline = state.deadline_of(group.min_version)
        state.ready[group.id] = group


def attach(outcomes: Sequence[Outcome], credits: Sequence[Sequence[Credit]]) -> list[Sample]:
    """Pair every trainable sample with its credit and its body, and keep those that carry a signal.

    Raises:
        RunFailed: the algorithm returned another number of credits than there are trainable samples.
    """
    samples = []
    for outcome, assigned in zip(outcomes, credits, strict=True):
        position = taken = 0
        for rollout in outcome.rollouts:
            for header in rollout.samples:
                body = outcome.bodies[position]
                position += 1
                if not rollout.trainable:
                    continue
                if taken == len(assigned):
                    raise RunFailed(f"the algorithm returned {taken} credits for an episode with more samples")
                credit = assigned[taken]
                taken += 1
                if has_signal(header, credit):
                    samples.append(Sample(outcome.episode_id, header, credit, body))
        if taken != len(assigned):
            raise RunFailed(f"the algorithm returned {len(assigned)} credits for an episode with {taken} samples")
    return samples
