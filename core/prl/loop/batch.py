"""The batch loop.

Consumes: `ready` groups. Waits for: enough of them, and for stragglers that going on would make too stale. Unblocked
by: the score loop, and the train loop taking a batch (one may wait in front of the trainer). Produces: `formed`
batches.

This is where the guarantee is kept: a sample older than `max_staleness` never passes `_sweep`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from prl.loop.groups import Group, Sample
from prl.loop.schedule import select
from prl.loop.state import Batch, LoopState
from prl.messages import TrainBatch, TrainSample, TrainUpdate
from prl.packing import model_cost, pack
from prl.rows import denominators


class Batcher:
    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._cost = model_cost(state.config.model.path)

    async def run(self) -> None:
        state = self._state
        while not state.done:
            if state.stopping or state.batches >= state.steps:
                blocker = ("train", "every batch is formed")
            elif state.formed:
                blocker = ("train", f"batch {state.batches} is formed and not yet taken")
            else:
                formed, blocker = self._form(state.batches + 1)
                if formed:
                    continue
            with state.waits.on("batch", *blocker):
                await state.signal.wait()

    def _form(self, step: int) -> tuple[bool, tuple[str, str]]:
        """Form batch `step` if it can be formed now; otherwise say what is missing."""
        state = self._state
        loop = state.config.loop
        self._sweep(step)
        running = [*state.in_flight.values(), *state.finished]
        chosen, stragglers = select(state.ready.values(), running, step, loop.groups_per_step)
        # One that has finished and is about to be scored is no straggler any more.
        running_late = [group_id for group_id in stragglers if group_id in state.in_flight]
        if running_late and loop.straggler == "drop":
            self._drop_stragglers(running_late)
            return True, ("", "")
        if stragglers:
            names = ", ".join(map(str, stragglers[:4]))
            return False, (
                "generate",
                f"step {step} waits for {len(stragglers)} straggling groups ({names}): "
                "without it they would become too stale",
            )
        if not chosen:
            return False, ("score", f"{len(state.ready)} of {loop.groups_per_step} groups for step {step} are ready")
        groups = [state.ready.pop(group_id) for group_id in chosen]
        samples = [sample for group in groups for sample in group.samples or ()]
        if not samples:
            self._skip(groups)
        else:
            state.barren = 0
            state.batches = step
            state.formed.append(self._build(step, groups, samples))
        state.progress = asyncio.get_running_loop().time()
        state.signal.notify()
        return True, ("", "")

    def _sweep(self, step: int) -> None:
        """Drop what step `step` may not train any more. Rare: admission and selection are there to prevent it."""
        state = self._state
        for group in [g for g in state.ready.values() if g.deadline < step]:
            del state.ready[group.id]
            state.discard(group, "stale", redraw=True)

    def _drop_stragglers(self, group_ids: Sequence[int]) -> None:
        """Give up groups that are still running: their episodes are cancelled and their tasks drawn again."""
        state = self._state
        for group_id in group_ids:
            state.cancel(group_id)
            group = state.in_flight.pop(group_id, None)
            if group is not None:
                running = group.size - len(group.outcomes) - len(group.failures)
                state.ledger.drop("stale", running)
                state.discard(group, "stale", redraw=True)

    def _skip(self, groups: Sequence[Group]) -> None:
        """A batch in which every reward equals its group's: there is nothing to train, and it is no step.

        Raises:
            RunFailed: it happens too often (`LoopState.count_barren`).
        """
        state = self._state
        for group in groups:
            state.discard(group, "no_signal", redraw=False)
        state.count_barren(len(groups))

    def _build(self, step: int, groups: list[Group], samples: list[Sample]) -> Batch:
        state = self._state
        trained = [group for group in groups if group.samples]
        count = min(state.config.trainer.updates_per_batch, len(trained))
        bounds = [len(trained) * part // count for part in range(count + 1)]
        parts = [trained[first:last] for first, last in itertools.pairwise(bounds)]
        updates = [self._update([sample for group in part for sample in group.samples or ()]) for part in parts]
        messages = [
            TrainBatch(state.run_id, state.incarnation, step, step - 1, [update[rank] for update in updates])
            for rank in range(state.roles.trainer.dp_size)
        ]
        return Batch(step, groups, samples, messages, sum(sample.header.num_tokens for sample in samples))

    def _update(self, samples: Sequence[Sample]) -> list[TrainUpdate]:
        """For every data-parallel rank its rows of one optimiser step."""
        state = self._state
        lengths = [sample.header.num_tokens for sample in samples]
        whole = denominators((sample.header, sample.credit) for sample in samples)
        ranks = pack(lengths, state.config.trainer.row_tokens, state.roles.trainer.dp_size, self._cost)
        return [TrainUpdate([_train_row(samples, row) for row in rows], whole) for rows in ranks]


def _train_row(samples: Sequence[Sample], row: Sequence[int]) -> list[TrainSample]:
    return [TrainSample(samples[index].header, samples[index].credit, samples[index].body) for index in row]
