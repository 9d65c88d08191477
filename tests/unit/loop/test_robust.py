"""What an adversary would try on the production loop, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from prl.config.schema import RunConfig
from prl.errors import RunFailed
from prl.loop.batch import Batcher
from prl.loop.groups import Group
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Outcome, Task


async def no_save(step: int, data: bytes) -> None:
    pass


def test_a_straggler_that_has_just_finished_is_scored_not_dropped_and_nothing_spins() -> None:
    state = fake_state(fake_config(steps=9, groups_per_step=1, max_staleness=0, straggler="drop"))
    state.ledger.dispatch(4)
    state.finished.append(Group(0, "fake", Task("late"), 2, version=0, deadline=1))
    state.ready[1] = Group(1, "fake", Task("early"), 2, version=0, deadline=1)
    formed, blocker = Batcher(state)._form(1)
    assert not formed and blocker[0] == "generate"
    assert state.ledger.pending == 4


@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("when", ["start", "between", "end"])
def test_a_stop_during_an_evaluation_does_not_wait_for_it(when: str, bound: int) -> None:
    """Whoever stops a run has a minute before it is killed; an evaluation may take half an hour."""
    saved: list[int] = []

    async def save(step: int, data: bytes) -> None:
        saved.append(step)

    async def main() -> LoopState:
        config = fake_config(steps=4, max_staleness=bound, episode_timeout_s=1e9)
        table = {"tasks": 300, "every": 2, "at_start": when == "start", "at_end": True, "timeout_s": 1e6}
        config = config.model_copy(update={"eval": config.eval.model_copy(update=table)})
        fleet = FakeFleet()
        runner = FakeRunner(fleet, seconds=lambda request: 1e5 if request.kind == "eval" else 0.0)
        state = fake_state(config, runner=runner, trainer=FakeTrainer(lambda: 1.0), fleet=fleet)
        if when == "end":
            state.version = state.batches = 4
        task = asyncio.create_task(Loop(state, save).run())
        await asyncio.sleep(10)
        assert runner.running >= 300, "no evaluation is going on"
        state.stopping = True
        state.signal.notify()
        async with asyncio.timeout(5):
            await task
        await asyncio.sleep(0)
        assert runner.running == 0
        return state

    state = clock.run(main(), limit_s=1e4)
    assert saved[-1] == state.version
    assert not [values for _, values in state.sink.lines if "eval/seconds" in values]  # type: ignore[attr-defined]


def test_a_sample_that_fits_into_no_row_fails_and_the_run_goes_on() -> None:
    """Packing would refuse it in the middle of the run, after all the others of its batch were sampled."""

    class Long(FakeRunner):
        def _outcome(self, request: EpisodeRequest, versions: tuple[int, ...]) -> Outcome:
            self._shape = (40, 2) if request.episode_id % 8 == 5 else (8, 2)
            return super()._outcome(request, versions)

    def config(**loop: object) -> RunConfig:
        made = fake_config(steps=3, group_size=4, **loop)
        return made.model_copy(update={"trainer": made.trainer.model_copy(update={"row_tokens": 32})})

    fleet = FakeFleet()
    state = fake_state(config(), runner=Long(fleet), fleet=fleet)
    clock.run(Loop(state, no_save).run(), limit_s=1e6)
    counts = state.ledger.counts()
    assert counts["failed"] == {"too_long": counts["dispatched"] // 8}
    state = fake_state(config(failure_window=10), runner=FakeRunner(fleet, num_tokens=33), fleet=fleet)
    with pytest.raises(RunFailed, match=r"too_long 10.*trainer.row_tokens = 32; raise it"):
        clock.run(Loop(state, no_save).run(), limit_s=1e6)
