"""What an adversary would try on the production loop, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from prl.config.schema import RunConfig
from prl.errors import EpisodeFailed, RunFailed
from prl.loop.batch import Batcher
from prl.loop.groups import Group, Sample
from prl.loop.state import Batch, LoopState
from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest, TrainBatch, TrainReport
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Credit, Outcome, SampleHeader, Task


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


def run(state: LoopState) -> LoopState:
    clock.run(Loop(state, no_save).run(), limit_s=1e6)
    return state


def test_the_trainer_checks_the_bound_once_more_on_what_is_really_sent() -> None:
    """Whatever a defect elsewhere does to a batch, a sample that is too old does not reach the trainer."""
    state = fake_state(fake_config(steps=9, max_staleness=1))
    trainer = Loop(state, no_save)._trainer
    state.version = 4
    for oldest, allowed in ((4, True), (3, True), (2, False)):
        samples = [Sample(0, SampleHeader(8, ((2, 6),), version, 4), Credit(), b"") for version in (4, oldest)]
        batch = Batch(5, [], samples, [], 16)
        if allowed:
            trainer._check(batch)
            continue
        with pytest.raises(AssertionError, match="staleness 2 in batch 5"):
            clock.run(trainer._step(batch))
    assert not state.roles.trainer.trained  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="batch 6 after version 4"):
        trainer._check(Batch(6, [], [], [], 0))


@pytest.mark.parametrize(("step", "incarnation"), [(1, 0), (2, 1)])
def test_a_report_of_another_step_or_of_a_former_trainer_ends_the_run(step: int, incarnation: int) -> None:
    class Confused(FakeTrainer):
        async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
            report = await super().train(batches)
            return TrainReport(incarnation, step, step, {}, 0.0) if report.step == 2 else report

    with pytest.raises(RunFailed, match=f"reported step {step} of incarnation {incarnation}"):
        run(fake_state(fake_config(steps=3), trainer=Confused()))


def test_a_member_without_signal_is_not_counted_as_trained() -> None:
    """Its reward is the group's mean: nothing of it was in the batch."""
    fleet = FakeFleet()
    runner = FakeRunner(fleet, reward=lambda request: [0.0, 0.5, 1.0][request.episode_id % 3])
    config = fake_config(steps=3, group_size=3, max_attempts=1, max_staleness=0)
    counts = run(fake_state(config, runner=runner, fleet=fleet)).ledger.counts()
    assert counts["trained"] == 3 * 4 * 2 and counts["dropped"] == {"no_signal": 3 * 4}


def test_an_evaluation_tries_again_what_was_not_the_episodes_own_fault() -> None:
    """A worker that dies takes all its episodes with it: a score over the one that had finished would say nothing."""

    def fails(request: EpisodeRequest) -> EpisodeFailed | None:
        if request.kind != "eval" or request.attempt == 2:
            return None
        broken = request.task.id == "eval-3"
        return EpisodeFailed("env_error") if broken else EpisodeFailed("worker_lost", retryable=True)

    config = fake_config(steps=1)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": 6})})
    fleet = FakeFleet()
    state = run(fake_state(config, runner=FakeRunner(fleet, fails=fails), fleet=fleet))
    values = [values for _, values in state.sink.lines if "eval/fake/episodes" in values]  # type: ignore[attr-defined]
    assert [(v["eval/fake/episodes"], v["eval/fake/failed"]) for v in values] == [(5, 1), (5, 1)]


def test_a_paused_run_can_be_saved_and_stopped() -> None:
    saved: list[int] = []

    async def save(step: int, data: bytes) -> None:
        saved.append(step)

    async def main() -> LoopState:
        state = fake_state(fake_config(steps=50), trainer=FakeTrainer(lambda: 1.0))
        task = asyncio.create_task(Loop(state, save).run())
        await asyncio.sleep(3.5)
        state.paused = "by a test"
        await asyncio.sleep(20)
        state.checkpoint_requested = True
        state.signal.notify()
        await asyncio.sleep(1)
        assert saved == [state.version] and state.version < 50
        state.stopping = True
        state.signal.notify()
        await task
        return state

    state = clock.run(main(), limit_s=1e4)
    assert saved == [state.version] * 2
