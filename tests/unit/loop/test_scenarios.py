"""What broke other asynchronous trainers, replayed against the production loop on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from prl.config.schema import MismatchTable
from prl.errors import EpisodeFailed, RunFailed
from prl.loop import snapshot
from prl.loop.batch import Batcher
from prl.loop.groups import Group, has_signal
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.loop.tasks import TaskSource
from prl.messages import Correction, EpisodeRequest, WeightsRef
from prl.testing import clock
from prl.testing.fakes import FakeAlgorithm, FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Credit, Outcome, SampleHeader, Task


async def no_save(step: int, data: bytes) -> None:
    pass


def finish(state: LoopState) -> LoopState:
    clock.run(Loop(state, no_save).run(), limit_s=1e6)
    return state


def test_t1_capacity_after_a_resume_equals_capacity_before() -> None:
    """A counter that restarts at 0 would admit a hundred batches too many."""
    config = fake_config(steps=200, groups_per_step=4, max_staleness=2)
    state = fake_state(config)
    state.version = state.batches = 100
    state.roles.fleet.version = 100  # type: ignore[misc]
    state.ready = {i: Group(i, "fake", Task(str(i)), 2, 100, 103) for i in range(5)}
    before = state.admissible
    again = fake_state(config)
    again.roles.fleet.version = 100  # type: ignore[misc]
    snapshot.restore(again, snapshot.take(state, None, None))
    assert again.admissible == before == 3 * 4 - 5


def test_t2_staleness_counts_versions_not_updates_and_the_bound_is_exact() -> None:
    """Three updates while a rollout is in flight are a staleness of three: allowed at K = 3, impossible at K = 2."""
    for bound in (3, 2):
        fleet = FakeFleet()
        slow = lambda request: 100.0 if request.task.id == "train-0" else 1.0  # noqa: E731
        runner = FakeRunner(fleet, seconds=slow)
        trainer = FakeTrainer(lambda: 1.0)
        config = fake_config(steps=6, groups_per_step=1, max_staleness=bound)
        finish(fake_state(config, runner=runner, trainer=trainer, fleet=fleet))
        stalest = {step: step - 1 - min(v for v, _ in rows) for step, rows in trainer.trained.items()}
        assert max(stalest.values()) == bound


def test_t2_synchronous_makes_progress() -> None:
    trainer = FakeTrainer(lambda: 1.0)
    state = finish(fake_state(fake_config(steps=5, max_staleness=0), trainer=trainer))
    assert state.version == 5 and state.staleness_max == 0


def test_t3_what_is_too_old_in_the_queue_is_dropped_once_and_its_task_drawn_again() -> None:
    state = fake_state(fake_config(steps=9, groups_per_step=1, group_size=2, max_staleness=1))
    outcome = Outcome(0, (), [])
    state.ledger.dispatch(2)
    group = Group(0, "fake", Task("old"), 2, version=0, deadline=2)
    group.outcomes = {0: outcome, 1: outcome}
    state.ready[0] = group
    state.batches = 2
    Batcher(state)._sweep(step=3)
    assert not state.ready
    assert state.ledger.counts()["dropped"] == {"stale": 2} and state.ledger.pending == 0
    assert clock.run(state.tasks.draw()) == ("fake", Task("old"), 1)


@pytest.mark.parametrize("install_seconds", [0.0, 2.5, 100.0])
def test_t4_a_slow_consumer_skips_versions_explicitly_and_never_blocks_the_trainer(install_seconds: float) -> None:
    """Every version is either installed or released without having been; none is forgotten."""
    fleet = FakeFleet(lambda: install_seconds)
    trainer = FakeTrainer(lambda: 1.0)
    finish(fake_state(fake_config(steps=8, max_staleness=8), trainer=trainer, fleet=fleet))
    assert fleet.installed[-1] == 8 and fleet.installed == sorted(set(fleet.installed))
    assert set(trainer.released) == set(range(8)), "a version was neither installed over nor skipped"


def test_t5_an_instant_environment_ends_cleanly_and_the_last_weights_arrive() -> None:
    fleet = FakeFleet(lambda: 5.0)
    trainer = FakeTrainer(lambda: 10.0)
    state = finish(fake_state(fake_config(steps=5, max_staleness=4), trainer=trainer, fleet=fleet))
    assert state.version == 5 and fleet.version == 5
    assert state.ledger.pending == 0


def test_t6_a_final_evaluation_that_hangs_reports_what_it_has_and_the_run_ends() -> None:
    config = fake_config(steps=2)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": 20, "timeout_s": 60.0})})

    def seconds(request: EpisodeRequest) -> float:
        return 1e9 if request.kind == "eval" and int(request.task.id.split("-")[1]) % 2 else 1.0

    fleet = FakeFleet()
    state = fake_state(config, runner=FakeRunner(fleet, seconds=seconds), fleet=fleet)
    clock.run(Loop(state, no_save).run(), limit_s=1000)
    last = [values for _, values in state.sink.lines if "eval/fake/unfinished" in values][-1]  # type: ignore[attr-defined]
    assert last["eval/fake/unfinished"] == 10 and last["eval/fake/episodes"] == 10


@pytest.mark.parametrize("steps", [0, 3])
def test_t7_nothing_left_to_do_ends_at_once(steps: int) -> None:
    """A resume at the last step, and a run of no steps, train nothing and return."""
    state = fake_state(fake_config(steps=steps, max_staleness=4))
    state.version = state.batches = steps
    finish(state)
    assert state.version == steps and state.ledger.dispatched == 0


def test_t7_fewer_steps_than_the_staleness_bound() -> None:
    assert finish(fake_state(fake_config(steps=1, max_staleness=4))).ledger.counts()["trained"] == 8


def test_t9_tasks_go_on_after_the_end_of_an_epoch_exactly_there() -> None:
    """A checkpoint right at the end of an epoch must not end the training silently."""

    async def draw(source: TaskSource, number: int) -> list[str]:
        return [(await source.draw())[1].id for _ in range(number)]

    async def main() -> None:
        runner = FakeRunner(FakeFleet(), num_tasks=6)
        source = TaskSource(runner, {"fake": 1.0}, seed=0)
        assert await draw(source, 6) == [f"train-{i}" for i in range(6)]
        again = TaskSource(runner, {"fake": 1.0}, seed=0)
        again.load_state(source.state())
        assert await draw(again, 8) == [f"train-{i % 6}" for i in range(8)]

    asyncio.run(main())


def test_t10_the_next_task_after_a_resume_is_the_expected_one_whatever_was_prefetched() -> None:
    async def main() -> None:
        runner = FakeRunner(FakeFleet(), num_tasks=10_000)
        weights = {"a": 1.0, "b": 3.0}
        source = TaskSource(runner, weights, seed=5)
        for _ in range(300):
            await source.draw()
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(source.state()), type=type(source.state()))
        expected = [await source.draw() for _ in range(700)]
        again = TaskSource(runner, weights, seed=5)
        again.load_state(state)
        assert [await again.draw() for _ in range(700)] == expected

    asyncio.run(main())


def constant(value: float) -> Callable[[EpisodeRequest], float]:
    return lambda request: value


def test_t20_equal_rewards_everywhere_stop_the_run_loudly() -> None:
    fleet = FakeFleet()
    state = fake_state(
        fake_config(steps=5, max_empty_batches=7), runner=FakeRunner(fleet, reward=constant(1.0)), fleet=fleet
    )
    with pytest.raises(RunFailed, match=r"7 batches in a row"):
        finish(state)
    assert state.ledger.counts()["dropped"]["no_signal"] == 7 * 4 * 2


def test_t20_supervised_weights_are_kept_where_every_advantage_is_zero() -> None:
    class CeAlgorithm(FakeAlgorithm):
        def credit(self, members):  # type: ignore[no-untyped-def]
            return [
                [Credit(ce=((h.num_tokens, 0.1),)) for r in member.rollouts for h in r.samples] for member in members
            ]

    fleet = FakeFleet()
    state = fake_state(fake_config(steps=3), runner=FakeRunner(fleet, reward=constant(1.0)), fleet=fleet)
    state.algorithm = CeAlgorithm()
    assert finish(state).ledger.counts()["trained"] == 3 * 4 * 2


def test_a_sample_without_sampled_tokens_carries_no_policy_signal() -> None:
    credit = Credit(((4, 1.0),), ((4, 1.0),))
    assert has_signal(SampleHeader(4, ((1, 3),), 0, 0), credit)
    assert not has_signal(SampleHeader(4, (), 0, 0), credit)


def test_t21_a_failed_member_leaves_the_baseline_to_its_own_group() -> None:
    """Members fail and finish in any order, groups interleave: credit sees each group alone, without the failed."""
    seen: list[list[int]] = []

    class Recording(FakeAlgorithm):
        def credit(self, members):  # type: ignore[no-untyped-def]
            seen.append([member.episode_id for member in members])
            return super().credit(members)

    def fails(request: EpisodeRequest) -> EpisodeFailed | None:
        return EpisodeFailed("env_error") if request.episode_id % 4 == 1 else None

    fleet = FakeFleet()
    runner = FakeRunner(fleet, seconds=lambda request: float(request.seed % 7), fails=fails)
    state = fake_state(fake_config(steps=3, groups_per_step=2, group_size=4), runner=runner, fleet=fleet)
    state.algorithm = Recording()
    finish(state)
    for members in seen:
        assert len(members) == 3 and len({episode // 4 for episode in members}) == 1
    counts = state.ledger.counts()
    assert counts["failed"] == {"env_error": counts["dispatched"] // 4}


def test_a_group_with_too_few_members_is_dropped_and_drawn_again() -> None:
    def fails(request: EpisodeRequest) -> EpisodeFailed | None:
        return EpisodeFailed("env_error") if request.task.id == "train-0" and request.episode_id % 2 == 0 else None

    fleet = FakeFleet()
    state = finish(fake_state(fake_config(steps=2, max_redraws=2), runner=FakeRunner(fleet, fails=fails), fleet=fleet))
    assert state.ledger.counts()["dropped"]["incomplete_group"] == 3, "the task is drawn 1 + max_redraws times"


def test_a_run_whose_episodes_mostly_fail_stops_loudly() -> None:
    fleet = FakeFleet()
    runner = FakeRunner(fleet, fails=lambda request: EpisodeFailed("bad_logprobs", "token 3 has none\nmore"))
    state = fake_state(fake_config(steps=5, failure_window=20, max_failure_share=0.5), runner=runner, fleet=fleet)
    with pytest.raises(RunFailed, match=r"100% of the last 20 .*the latest: bad_logprobs: token 3 has none\. The"):
        finish(state)


def test_a_retryable_failure_is_tried_again_and_counted_once() -> None:
    def fails(request: EpisodeRequest) -> EpisodeFailed | None:
        return EpisodeFailed("worker_lost", retryable=True) if request.attempt < 2 else None

    fleet = FakeFleet()
    runner = FakeRunner(fleet, fails=fails)
    state = finish(fake_state(fake_config(steps=2, max_attempts=3), runner=runner, fleet=fleet))
    assert state.ledger.counts()["failed"] == {} and runner.requests == 3 * state.ledger.dispatched


def test_an_unscored_rollout_is_a_failure_not_a_zero() -> None:
    fleet = FakeFleet()
    runner = FakeRunner(fleet, reward=lambda request: None if request.episode_id % 2 else 1.0)
    state = fake_state(fake_config(steps=1, groups_per_step=1, max_empty_batches=1), runner=runner, fleet=fleet)
    with pytest.raises(RunFailed):
        finish(state)
    assert "unscored" in state.ledger.counts()["failed"]


def test_a_trainer_that_hangs_ends_the_run_with_its_name() -> None:
    trainer = FakeTrainer(lambda: 1e9)
    state = fake_state(fake_config(steps=2, step_timeout_s=30), trainer=trainer)
    with pytest.raises(RunFailed, match=r"training step 1 took longer than loop.step_timeout_s = 30 s"):
        finish(state)


def test_a_trainer_that_never_publishes_the_first_version_ends_the_run_too() -> None:
    class Silent(FakeTrainer):
        async def publish(self, version: int) -> WeightsRef:
            await asyncio.sleep(1e9)
            return await super().publish(version)

    with pytest.raises(RunFailed, match=r"publishing version 0 took longer than loop.step_timeout_s = 30 s"):
        finish(fake_state(fake_config(steps=2, step_timeout_s=30), trainer=Silent()))


def test_a_stop_finishes_the_step_saves_and_keeps_what_is_queued() -> None:
    saved: dict[int, bytes] = {}

    async def save(step: int, data: bytes) -> None:
        saved[step] = data

    async def main() -> LoopState:
        fleet = FakeFleet()
        runner = FakeRunner(fleet, seconds=lambda request: 1.0)
        state = fake_state(
            fake_config(steps=100, max_staleness=4), runner=runner, trainer=FakeTrainer(lambda: 10.0), fleet=fleet
        )
        task = asyncio.create_task(Loop(state, save).run())
        await asyncio.sleep(35)
        state.stopping = True
        state.signal.notify()
        await task
        return state

    state = clock.run(main(), limit_s=1e4)
    assert list(saved) == [state.version] and 0 < state.version < 100
    taken = msgspec.msgpack.decode(saved[state.version], type=snapshot.Snapshot)
    assert len(taken.ready) + len(taken.in_flight) == state.ledger.pending / 2 > 0


def test_why_stuck_names_the_chain_of_waits() -> None:
    async def main() -> tuple[list[str], LoopState]:
        fleet = FakeFleet()
        runner = FakeRunner(fleet, seconds=lambda request: 1e6)
        config = fake_config(steps=3, stuck_after_s=40, episode_timeout_s=1e7)
        state = fake_state(config, runner=runner, fleet=fleet)
        task = asyncio.create_task(Loop(state, no_save).run())
        await asyncio.sleep(100)
        lines = state.waits.describe()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return lines, state

    lines, state = clock.run(main(), limit_s=1e7)
    text = "\n".join(lines)
    assert "train waits for batch" in text and "batch waits for score" in text and "score waits for generate" in text
    assert "max_staleness = 2" in text
    assert any(kind == "stuck" for kind, _ in state.sink.events)  # type: ignore[attr-defined]


def test_pause_lets_the_step_finish_and_resume_goes_on() -> None:
    async def main() -> tuple[int, int]:
        trainer = FakeTrainer(lambda: 1.0)
        state = fake_state(fake_config(steps=50), trainer=trainer)
        task = asyncio.create_task(Loop(state, no_save).run())
        await asyncio.sleep(5.5)
        state.paused = "by a test"
        await asyncio.sleep(100)
        at_pause = state.version
        state.paused = ""
        state.signal.notify()
        await task
        return at_pause, state.version

    at_pause, end = clock.run(main(), limit_s=1e5)
    assert at_pause <= 6 and end == 50


@pytest.mark.parametrize("action", ["warn", "pause", "stop"])
def test_a_mismatch_past_its_limit_warns_pauses_or_stops(action: str) -> None:
    class Wrong(FakeTrainer):
        async def train(self, batches):  # type: ignore[no-untyped-def]
            report = await super().train(batches)
            report.metrics["mismatch/kl"] = 0.5 if report.step == 2 else 0.0001
            return report

    async def main() -> LoopState:
        config = fake_config(steps=4)
        config = config.model_copy(update={"mismatch": config.mismatch.model_copy(update={"action": action})})
        state = fake_state(config, trainer=Wrong(lambda: 1.0))
        task = asyncio.create_task(Loop(state, no_save).run())
        await asyncio.sleep(1000)
        if action == "pause":
            assert state.version == 2 and "0.5" in state.paused
            state.paused = ""
            state.signal.notify()
        await task
        return state

    if action == "stop":
        with pytest.raises(RunFailed, match=r"step 2: the mismatch KL .* is 0.5"):
            clock.run(main())
    else:
        state = clock.run(main())
        assert state.version == 4 and [kind for kind, _ in state.sink.events].count("mismatch") == 1  # type: ignore[attr-defined]


def mismatched(**table: object) -> tuple[LoopState, list[Correction]]:
    """A run of six steps whose second shows a mismatch; with which correction each step was trained."""
    used: list[Correction] = []

    class Wrong(FakeTrainer):
        async def train(self, batches):  # type: ignore[no-untyped-def]
            assert len({batch.correction for batch in batches}) == 1, "ranks must agree"
            used.append(batches[0].correction)
            report = await super().train(batches)
            report.metrics["mismatch/kl"] = 0.5 if report.step == 2 else 0.0001
            return report

    config = fake_config(steps=6)
    config = config.model_copy(update={"mismatch": MismatchTable.model_validate(table)})
    state = fake_state(config, trainer=Wrong(lambda: 1.0, dp_size=2))
    clock.run(Loop(state, no_save).run())
    return state, used


def test_a_mismatch_past_its_limit_puts_the_correction_in_force_and_says_why() -> None:
    """From the next batch on, also if that was formed before; a resumed run goes on with it."""
    state, used = mismatched(action="correct", correction="truncate")
    assert used == [Correction()] * 2 + [Correction("truncate", 2.0)] * 4
    events = dict(state.sink.events)  # type: ignore[attr-defined]
    assert events["correction"]["correction"] == "truncate" and events["correction"]["clip"] == 2.0
    assert "step 2: the mismatch KL between trainer and engine is 0.5" in str(events["correction"]["reason"])
    again = fake_state(state.config)
    assert again.correction == Correction()
    snapshot.restore(again, snapshot.take(state, None, None))
    assert again.correction == Correction("truncate", 2.0)


def test_a_correction_of_another_action_is_in_force_from_the_start() -> None:
    assert mismatched(action="warn", correction="mask_sequences")[1] == [Correction("mask_sequences", 1.05)] * 6
    assert mismatched(action="warn", correction="mask_tokens", clip=5)[1] == [Correction("mask_tokens", 5.0)] * 6
