"""What each loop must not do, one rule at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from prl.errors import EpisodeFailed, RunFailed
from prl.loop import snapshot
from prl.loop.batch import Batcher
from prl.loop.groups import Group
from prl.loop.mismatch import check_mismatch
from prl.loop.score import Scorer, attach
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest, Installed, TrainReport, WeightsRef
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeSink, FakeTrainer, fake_config, fake_sample, fake_state
from prl.types import Credit, Outcome, Reward, RolloutHeader, SampleHeader, Task


async def no_save(step: int, data: bytes) -> None:
    pass


def outcome(episode_id: int, reward: float, *versions: int) -> Outcome:
    body, header = fake_sample(8, 2, versions or (0,))
    rollout = RolloutHeader("policy", True, reward, {"reward": Reward(reward)}, (header,))
    return Outcome(episode_id, (rollout,), [body])


def scored(state: LoopState, **more: object) -> Group:
    """A group of two through the score loop's work."""
    state.ledger.dispatch(2)
    group = Group(0, "fake", Task("a"), 2, version=3, deadline=state.deadline_of(3), **more)  # type: ignore[arg-type]
    Scorer(state)._score(group)
    return group


def test_what_another_agent_said_is_not_trained_and_bodies_stay_with_their_samples() -> None:
    """The seats of one episode: an opponent, the policy with two samples, another policy that never replied."""
    header = SampleHeader(4, ((1, 3),), 0, 0)
    rollouts = (
        RolloutHeader("opponent", False, None, {}, (header, header)),
        RolloutHeader("policy", True, 1.0, {}, (header, header)),
        RolloutHeader("silent", True, 1.0, {}, ()),
        RolloutHeader("judge", False, None, {}, (header,)),
        RolloutHeader("second", True, 1.0, {}, (header,)),
    )
    bodies = [b"opponent 0", b"opponent 1", b"policy 0", b"policy 1", b"judge", b"second"]
    credits = [Credit(((4, float(i)),), ((4, 1.0),)) for i in (1, 2, 3)]
    samples = attach([Outcome(5, rollouts, bodies)], [credits])
    assert [(s.body, s.credit.advantages[0][1]) for s in samples] == [
        (b"policy 0", 1),
        (b"policy 1", 2),
        (b"second", 3),
    ]
    for wrong in (credits[:2], [*credits, credits[0]]):
        with pytest.raises(RunFailed, match="credits for an episode"):
            attach([Outcome(5, rollouts, bodies)], [wrong])


def test_a_group_is_credited_in_the_order_of_its_members_not_of_their_ends() -> None:
    members = {index: outcome(10 + index, float(index)) for index in range(2)}
    orders = []
    for order in ([0, 1], [1, 0]):
        group = scored(fake_state(fake_config()), outcomes={index: members[index] for index in order})
        orders.append([(sample.episode_id, sample.credit.advantages) for sample in group.samples or ()])
    assert orders[0] == orders[1] and [episode for episode, _ in orders[0]] == [10, 11]


@pytest.mark.parametrize(("versions", "deadline"), [((3, 4), 6), ((5, 6), 8), ((1, 4), 4)])
def test_the_deadline_is_that_of_the_oldest_token_there_really_is(versions: tuple[int, ...], deadline: int) -> None:
    """Newer than at admission: later. Older, from an engine that had missed an update: earlier, and then dropped."""
    state = fake_state(fake_config(max_staleness=2))
    group = scored(state, outcomes={0: outcome(0, 0.0, 7), 1: outcome(1, 1.0, *versions)})
    assert group.deadline == deadline
    Batcher(state)._sweep(step=5)
    assert state.ledger.counts()["dropped"] == ({} if deadline >= 5 else {"stale": 2})


def requests_after(change: Callable[[LoopState], None], **loop: int) -> tuple[int, int]:
    """Training episodes asked for until `change`, and in the hundred seconds after it."""
    asked = 0

    def seconds(request: EpisodeRequest) -> float:
        nonlocal asked
        asked += 1
        return 1.0

    async def main() -> tuple[int, int]:
        fleet = FakeFleet()
        state = fake_state(
            fake_config(steps=1000, **loop),
            runner=FakeRunner(fleet, seconds=seconds),
            trainer=FakeTrainer(lambda: 30.0),
            fleet=fleet,
        )
        task = asyncio.create_task(Loop(state, no_save).run())
        await asyncio.sleep(15)
        before = asked
        # In the middle of a step: its end makes room for more.
        change(state)
        state.signal.notify()
        await asyncio.sleep(100)
        after = asked - before
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return before, after

    return clock.run(main(), limit_s=1e5)


def pause(state: LoopState) -> None:
    state.paused = "by a test"


def stop(state: LoopState) -> None:
    state.stopping = True
    # As much room as there can be, though the step in progress is not over.
    state.roles.fleet.version = 1  # type: ignore[misc]


@pytest.mark.parametrize("change", [pause, stop])
def test_a_paused_or_stopping_run_starts_no_episode(change: Callable[[LoopState], None]) -> None:
    before, after = requests_after(change)
    assert before > 0 and after == 0
    assert requests_after(lambda state: None)[1] > 0, "nothing would have been started anyway"


def test_an_environment_that_does_not_return_the_metric_of_the_evaluation_is_named_once() -> None:
    config = fake_config(steps=4)
    table = config.eval.model_copy(update={"tasks": 2, "every": 2, "metric": "exact"})
    loop = Loop(fake_state(config.model_copy(update={"eval": table})), no_save)
    clock.run(loop.run(), limit_s=1e6)
    assert loop.evaluator.last is None
    assert [text.partition(",")[0] for text in loop.evaluator.warnings] == ["fake returns no 'exact'"]


def test_a_synchronous_evaluation_has_the_engines_to_itself() -> None:
    overlapping = 0
    evaluating = 0

    class Watching(FakeRunner):
        async def run(self, request: EpisodeRequest) -> Outcome:
            nonlocal overlapping, evaluating
            evaluating += request.kind == "eval"
            overlapping += request.kind == "train" and evaluating > 0
            try:
                return await super().run(request)
            finally:
                evaluating -= request.kind == "eval"

    config = fake_config(steps=6, max_staleness=0)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": 5, "every": 2})})

    class Telling(FakeFleet):
        async def install(self, weights: WeightsRef) -> Installed:
            found = await super().install(weights)
            state.signal.notify()  # as the engines' fleet does
            return found

    fleet = Telling()
    state = fake_state(config, runner=Watching(fleet, seconds=lambda request: 3.0), fleet=fleet)
    clock.run(Loop(state, no_save).run(), limit_s=1e5)
    evaluated = [step for step, values in state.sink.lines if "eval/seconds" in values]  # type: ignore[attr-defined]
    assert evaluated == [0, 2, 4, 6] and overlapping == 0


@pytest.mark.parametrize(("limit", "most"), [(0, 12), (6, 6), (5, 5), (1, 2)])
def test_no_more_episodes_run_at_once_than_were_allowed(limit: int, most: int) -> None:
    """Whole groups are started: below a group's size one group still runs, or nothing ever would."""
    peak = 0

    def seconds(request: EpisodeRequest) -> float:
        nonlocal peak
        peak = max(peak, runner.running)
        return 1.0 + request.episode_id % 3

    fleet = FakeFleet()
    runner = FakeRunner(fleet, seconds=seconds)
    config = fake_config(steps=4, groups_per_step=2, max_staleness=2, max_concurrency=limit)
    state = fake_state(config, runner=runner, fleet=fleet)
    clock.run(Loop(state, no_save).run(), limit_s=1e4)
    assert state.version == 4 and peak == most


def test_a_slow_install_skips_what_has_been_overtaken_meanwhile() -> None:
    fleet = FakeFleet(lambda: 10.0)
    state = fake_state(fake_config(steps=12, max_staleness=8), trainer=FakeTrainer(lambda: 1.0), fleet=fleet)
    clock.run(Loop(state, no_save).run(), limit_s=1e4)
    assert fleet.installed[0] == 0 and fleet.installed[-1] == 12 and len(fleet.installed) < 7


def test_a_snapshot_holds_what_has_finished_and_is_not_scored() -> None:
    state = fake_state(fake_config(max_staleness=2))
    state.version = state.batches = 5
    state.ledger.dispatch(4)
    state.finished.append(Group(0, "fake", Task("a"), 2, 4, 7, outcomes={0: outcome(0, 1.0, 4), 1: outcome(1, 0.0, 5)}))
    state.in_flight[1] = Group(1, "fake", Task("b"), 2, 3, 6)
    again = fake_state(fake_config(max_staleness=2))
    snapshot.restore(again, snapshot.take(state, None, None))
    assert [group.id for group in again.finished] == [0] and again.finished[0].deadline == 7
    # Nothing of this one is left: it is sampled again, by the version of today.
    assert again.in_flight[1].version == 5 and again.in_flight[1].deadline == 8


def test_redraws_come_first_and_the_oldest_group_s_before_the_others() -> None:
    async def main() -> list[str]:
        source = fake_state(fake_config()).tasks
        await source.draw()
        for group, name in enumerate("cab"):
            source.put_back((group - 1) % 3, "fake", Task(name), 1)
        return [(await source.draw())[1].id for _ in range(4)]

    assert clock.run(main()) == ["a", "b", "c", "train-1"]


def test_every_attempt_of_every_episode_has_a_random_stream_of_its_own() -> None:
    seeds: list[int] = []

    def fails(request: EpisodeRequest) -> EpisodeFailed | None:
        seeds.append(request.seed)
        return EpisodeFailed("worker_lost", retryable=True) if request.attempt == 0 else None

    fleet = FakeFleet()
    config = fake_config(steps=3, group_size=3)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": 0})})
    clock.run(Loop(fake_state(config, runner=FakeRunner(fleet, fails=fails), fleet=fleet), no_save).run())
    assert len(set(seeds)) == len(seeds) == 3 * 4 * 3 * 2
    other = config.model_copy(update={"seed": 1})
    before = set(seeds)
    clock.run(Loop(fake_state(other, runner=FakeRunner(fleet := FakeFleet(), fails=fails), fleet=fleet), no_save).run())
    assert not before & set(seeds[len(before) :])


def test_every_task_is_evaluated_as_often_as_was_asked_and_the_first_score_stays_the_first() -> None:
    scores = iter([0.25] * 15 + [0.5] * 15 + [0.75] * 15)
    seeds: list[int] = []

    def reward(request: EpisodeRequest) -> float:
        if request.kind == "train":
            return request.seed % 7
        seeds.append(request.seed)
        return next(scores)

    config = fake_config(steps=4, max_staleness=0)
    table = config.eval.model_copy(update={"tasks": 5, "samples": 3, "every": 2})
    fleet = FakeFleet()
    loop = Loop(
        fake_state(
            config.model_copy(update={"eval": table}), runner=FakeRunner(fleet, reward=reward, num_tasks=9), fleet=fleet
        ),
        no_save,
    )
    clock.run(loop.run(), limit_s=1e4)
    assert (loop.evaluator.first, loop.evaluator.last) == (0.25, 0.75)
    # Samples of one task differ, evaluations of one run do not: they are compared with one another.
    assert len(set(seeds)) == 15 and seeds[:15] == seeds[15:30] == seeds[30:]


@pytest.mark.parametrize(
    ("dtype", "kl", "passes"),
    [
        ("float32", 0.001, True),
        ("float32", 0.00101, False),
        ("bfloat16", 0.015, True),
        ("bfloat16", 0.0151, False),
        ("float32", float("nan"), False),
        ("float32", float("inf"), False),
    ],
)
def test_the_limit_of_mismatch_is_the_precision_s_and_what_is_no_number_is_past_it(
    dtype: str, kl: float, passes: bool
) -> None:
    config = fake_config()
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    state = fake_state(config)
    check_mismatch(state, TrainReport(0, 1, 1, {"mismatch/kl": kl}, 0.0))
    assert (state.paused == "") is passes


def test_what_engines_find_of_the_probes_is_a_line_of_the_step_that_made_the_version() -> None:
    """Once a version, also where a later step is through by then. Not of the first, whose probes nobody sampled."""

    class Scoring(FakeFleet):
        async def install(self, weights: WeightsRef) -> Installed:
            version = weights.version
            self.probed = Installed(100, version / 1000, version / 10) if version else Installed(0, 0.0, 0.5)
            return await super().install(weights)

    async def main() -> LoopState:
        fleet = Scoring(lambda: 5.0)
        trainer = FakeTrainer(lambda: 2.0)
        state = fake_state(fake_config(steps=12), runner=FakeRunner(fleet), trainer=trainer, fleet=fleet)
        await Loop(state, no_save).run()
        assert fleet.installed[0] == 0 and len(fleet.installed) < 13, "some are skipped"
        return state

    state = clock.run(main())
    sink = cast(FakeSink, state.sink)
    installed = [data for kind, data in sink.events if kind == "weights_installed"]
    versions = [cast(int, data["version"]) for data in installed]
    assert [data["probe_kl"] for data in installed] == [version / 1000 for version in versions]
    assert installed[0]["probe_difference"] == 0.5
    lines = [(step, values) for step, values in sink.lines if "mismatch/probe_kl" in values]
    names = ("mismatch/probe_tokens", "mismatch/probe_kl", "mismatch/probe_difference")
    assert lines == [
        (version, dict(zip(names, (100, version / 1000, version / 10), strict=True))) for version in versions[1:]
    ]
    order = [(step, "mismatch/probe_kl" in values) for step, values in sink.lines]
    assert all(order.index((version, False)) < order.index((version, True)) for version in versions[1:])


def test_steps_with_few_tokens_of_their_own_version_are_judged_together() -> None:
    """One odd token in ten is no verdict; the same on the mean of enough of them."""
    state = fake_state(fake_config())

    def report(step: int, kl: float, tokens: int) -> str:
        check_mismatch(state, TrainReport(0, step, step, {"mismatch/kl": kl, "mismatch/tokens": tokens}, 0.0))
        return state.paused

    assert report(1, 0.09, 10) == "" and report(2, 0.0, 240) == ""
    data = snapshot.take(state, None, None)
    state = fake_state(fake_config())
    snapshot.restore(state, data)  # a resumed run goes on with them
    assert "step 3: the mismatch KL between trainer and engine is 0.0035" in report(3, 0.0, 7)
    state.paused = ""
    assert report(4, 0.0, 300) == "", "what was judged once is not judged again"
