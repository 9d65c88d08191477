"""`trainer.updates_per_batch`: a batch's groups are divided among optimiser steps with denominators of their own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest, TrainBatch, TrainReport, TrainSample
from prl.rows import denominators
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state

GROUPS = 5


class Recording(FakeTrainer):
    """Keeps what it is given."""

    def __init__(self, dp_size: int) -> None:
        super().__init__(dp_size=dp_size)
        self.given: list[Sequence[TrainBatch]] = []

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        self.given.append(batches)
        return await super().train(batches)


async def no_save(step: int, data: bytes) -> None:
    pass


def trained(updates: int, *, ranks: int = 1, easy: int = 0) -> list[Sequence[TrainBatch]]:
    """The batches of two steps of five groups of two samples; the first `easy` tasks bring no signal.

    The advantage of task t is +-(t + 1) / 2, so that a sample says to which group it belongs.
    """

    def reward(request: EpisodeRequest) -> float:
        task = int(request.task.id.partition("-")[2])
        return 0.0 if task < easy else float((task + 1) * (request.episode_id % 2))

    config = fake_config(steps=2, groups_per_step=GROUPS, group_size=2, max_staleness=0)
    own = {"updates_per_batch": updates, "row_tokens": 16}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=own)})
    fleet, trainer = FakeFleet(), Recording(ranks)
    state = fake_state(config, trainer=trainer, fleet=fleet, runner=FakeRunner(fleet, reward=reward))
    clock.run(Loop(state, no_save).run())
    assert state.version == 2
    return trainer.given


def of_update(batches: Sequence[TrainBatch], index: int) -> list[TrainSample]:
    return [sample for batch in batches for row in batch.updates[index].rows for sample in row]


def group_of(sample: TrainSample) -> float:
    return abs(sample.credit.advantages[0][1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("updates", "sizes"), [(1, [5]), (2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5), (9, [1] * 5)])
def test_groups_are_divided_among_the_updates(updates: int, sizes: list[int], ranks: int) -> None:
    for batches in trained(updates, ranks=ranks):
        assert len(batches) == ranks
        parts = [of_update(batches, index) for index in range(len(sizes))]
        assert all(len(batch.updates) == len(sizes) for batch in batches)
        groups = [{group_of(sample) for sample in part} for part in parts]
        assert [len(found) for found in groups] == sizes and len(set.union(*groups)) == GROUPS
        assert [len(part) for part in parts] == [2 * size for size in sizes]
        for index, part in enumerate(parts):
            whole = denominators((sample.header, sample.credit) for sample in part)
            assert all(batch.updates[index].denominators == whole for batch in batches)
            assert len({len(batch.updates[index].rows) for batch in batches}) == 1


def test_groups_without_signal_make_no_update() -> None:
    """Nor do they leave one empty: four of five groups have nothing to train."""
    first, second = trained(3, easy=4)
    assert [len(of_update(first, index)) for index in range(len(first[0].updates))] == [2]
    assert len(second[0].updates) == 3
