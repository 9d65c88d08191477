"""Adaptive concurrency: on a simulated engine with a cache, as a state machine, and in the production loop."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.loop.concurrency import COOLDOWN_S, CUT_ABOVE, PERIOD_S, QUEUE_S, SETTLE_S, AdaptiveLimit, Cut
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.messages import EngineGauges, EpisodeRequest
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state

GROUP = 4


@dataclass
class Engine:
    """A continuous batch over a cache of `capacity` tokens, in steps of `tick` seconds: a step of n requests samples
    `tick` * rate / (n + half) tokens of each. A request that does not fit loses its cache and waits at the front."""

    capacity: int
    lengths: tuple[int, int]
    seed: int = 0
    prompt: int = 40
    rate: float = 6000.0
    half: float = 20.0
    most: int = 10**9
    tick: float = 0.25
    running: list[list[float]] = field(default_factory=list)
    waiting: deque[list[float]] = field(default_factory=deque)
    preemptions: int = 0
    tokens: float = 0.0
    completed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def admit(self, episodes: int) -> None:
        for _ in range(episodes):
            self.waiting.append([0.0, self.prompt + self.random.randint(*self.lengths)])

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def used(self) -> float:
        return sum(done for done, _ in self.running)

    def gauges(self) -> EngineGauges:
        return EngineGauges(
            0,
            kv_usage=min(1.0, self.used / self.capacity),
            running=len(self.running),
            waiting=len(self.waiting),
            preemptions=self.preemptions,
            capacity=self.capacity,
        )

    def step(self) -> None:
        while self.waiting and len(self.running) < self.most and self.used + self.prompt < self.capacity:
            request = self.waiting.popleft()
            request[0] = max(request[0], float(self.prompt))
            self.running.append(request)
        if not self.running:
            return
        each = self.tick * self.rate / (len(self.running) + self.half)
        for request in self.running:
            self.tokens += min(each, request[1] - request[0])
            request[0] = min(request[1], request[0] + each)
        ended = [request for request in self.running if request[0] >= request[1]]
        self.running = [request for request in self.running if request[0] < request[1]]
        self.completed += len(ended)
        while self.used > self.capacity:  # the youngest is computed again from its prompt
            lost = self.running.pop()
            self.tokens -= lost[0] - self.prompt
            lost[0] = float(self.prompt)
            self.preemptions += 1
            self.waiting.appendleft(lost)


def drive(engine: Engine, limit: AdaptiveLimit | int, seconds: float, now: float = 0.0) -> list[Cut]:
    cuts, next_look = [], now
    end = now + seconds
    while now < end:
        if isinstance(limit, AdaptiveLimit) and now >= next_look:
            before = engine.in_flight
            cut = limit.observe(now, [engine.gauges()], engine.in_flight, engine.completed)
            cuts += [cut] if cut else []
            assert engine.in_flight == before and (limit.episodes or GROUP) >= GROUP
            next_look += PERIOD_S
        most = limit if isinstance(limit, int) else limit.episodes
        assert most is not None
        while engine.in_flight + GROUP <= max(most, GROUP):
            engine.admit(GROUP)
        engine.step()
        now += engine.tick
    return cuts


def measured(engine: Engine, limit: AdaptiveLimit | int) -> tuple[float, float]:
    """Tokens a second and preemptions a completed episode, once it has settled."""
    drive(engine, limit, 200)
    tokens, completed, preempted = engine.tokens, engine.completed, engine.preemptions
    drive(engine, limit, 200, now=200.0)
    done = max(1, engine.completed - completed)
    return (engine.tokens - tokens) / 200, (engine.preemptions - preempted) / done


WORLDS: dict[str, dict[str, Any]] = {
    "cache binds": {"capacity": 30_000, "lengths": (50, 400)},
    "long answers": {"capacity": 60_000, "lengths": (200, 3000)},
    "batch binds": {"capacity": 400_000, "lengths": (50, 400), "most": 64},
    "tiny cache": {"capacity": 4_000, "lengths": (50, 300)},
}


@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_within_a_tenth_of_the_best_fixed_concurrency_without_lasting_preemptions(name: str) -> None:
    world = WORLDS[name]
    grid = [GROUP * n for n in (1, 4, 8, 12, 16, 20, 24, 32, 48)]
    best = max(measured(Engine(**world), fixed)[0] for fixed in grid)
    adaptive = AdaptiveLimit(GROUP, 2 * world["lengths"][1])
    tokens, preempted = measured(Engine(**world), adaptive)
    assert tokens >= 0.9 * best and preempted < 0.1, (best, tokens, preempted, adaptive)


def test_what_it_adapts_to_matters_in_the_simulation() -> None:
    """Too few is slow, too many is preempted: a limit that never moved would fail the test above."""
    world = WORLDS["long answers"]
    few, many = measured(Engine(**world), GROUP), measured(Engine(**world), 256)
    assert few[0] < 0.5 * many[0] and many[1] > 0.2


def gauges(**values: float) -> list[EngineGauges]:
    return [EngineGauges(0, **{"capacity": 10_000, "running": 10, **values})]  # type: ignore[arg-type]


def started(limit: float = 100.0) -> AdaptiveLimit:
    found = AdaptiveLimit(GROUP, 10_000, limit=limit)
    found.observe(0.0, gauges(kv_usage=0.9), int(limit), 0)
    return found


READING = st.builds(
    lambda replica, **values: EngineGauges(replica, **values),
    st.integers(0, 2),
    kv_usage=st.floats(0, 1),
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    preemptions=st.integers(0, 10_000),
    capacity=st.sampled_from([0, 1_000, 50_000, 1_000_000]),
    age_s=st.sampled_from([0.1, 1.0, 60.0]),
)
LOOK = st.tuples(st.floats(0.1, 20), st.lists(READING, max_size=3), st.integers(0, 2000), st.integers(0, 500))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 64), st.integers(1, 100_000), st.lists(LOOK, max_size=20))
def test_whatever_engines_say_one_group_may_run_and_work_in_flight_is_left_alone(
    group: int, episode_tokens: int, looks: list[tuple[float, list[EngineGauges], int, int]]
) -> None:
    limit, now, completed = AdaptiveLimit(group, episode_tokens), 0.0, 0
    for seconds, said, in_flight, done in looks:
        now, completed = now + seconds, completed + done
        before, capacity = limit.limit, limit._capacity
        cut = limit.observe(now, said, in_flight, completed)
        if limit.limit is None:
            assert not any(engine.capacity for engine in said) and cut is None
            continue
        assert limit.limit >= group
        if before is None or limit._capacity != capacity:
            continue
        assert limit.limit <= 2 * before, "more than twofold at one look"
        if limit.limit > before:
            assert in_flight + done >= before - group, "it grew without having been reached"
            assert all(engine.age_s <= 5 and engine.kv_usage < CUT_ABOVE for engine in said)
        if cut is not None:
            assert cut.after < cut.before and str(cut.sign).startswith(f"engine-{cut.sign.engine.replica}: ")


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ({"kv_usage": 0.97}, "engine-0: its cache is 97% full (limit 95%)"),
        ({"preemptions": 5}, "engine-0: 50% of its requests were preempted (limit 2%)"),
        ({"waiting": 6}, "engine-0: 60% as many requests wait as run, for 5 s (limit 25%)"),
    ],
)
def test_a_cut_says_which_engine_and_why_and_is_followed_by_no_second_one(sign: dict[str, float], words: str) -> None:
    limit = started()
    steady = {name: value for name, value in sign.items() if name == "waiting"}
    limit.observe(1.0, gauges(**steady), 100, 0)
    cut = limit.observe(1.0 + QUEUE_S, gauges(**{"kv_usage": 0.9, **sign}), 100, 0)
    assert cut is not None and str(cut.sign) == words and cut.after < cut.before == 100
    # Until what is in flight has come down to the limit, and for a while after, more of the same is no news.
    more = iter(range(1, 9))

    def look(now: float, in_flight: int) -> Cut | None:
        worse = {name: value * (1 + next(more)) if name == "preemptions" else value for name, value in sign.items()}
        return limit.observe(now, gauges(**{"kv_usage": 0.9, **worse}), in_flight, 0)

    assert look(20.0, 99) is None and look(25.0, cut.after) is None and look(25.0 + COOLDOWN_S - 1, 50) is None
    second = look(25.0 + COOLDOWN_S, cut.after)
    assert second is not None and second.after < cut.after


def test_a_cut_starts_from_what_was_in_flight_not_from_a_limit_that_nobody_reached() -> None:
    limit = started(1000.0)
    cut = limit.observe(1.0, gauges(kv_usage=0.97), 100, 0)
    assert cut is not None and cut.before == 1000 and cut.after == 90


def test_it_grows_by_completed_rounds_fast_at_first_and_carefully_near_the_last_cut() -> None:
    limit = AdaptiveLimit(GROUP, 10_000, limit=100.0)
    limit.observe(1.0, gauges(kv_usage=0.1), 100, 0)
    assert limit.limit == 100, "nothing has ended: the caches do not show yet what is in flight"
    limit.observe(2.0, gauges(kv_usage=0.1), 100, 100)
    assert limit.limit == pytest.approx(200), "a round in nearly empty caches"
    limit.observe(60.0, gauges(kv_usage=0.5), 200, 300)
    half = 200 * (0.85 / 0.5) ** 0.5
    assert limit.limit == pytest.approx(half, rel=1e-3), "half of the way"
    limit.observe(120.0, gauges(kv_usage=0.9), 260, 300)
    assert limit.limit == pytest.approx(half, rel=1e-3), "in the band it holds"
    limit.observe(121.0, gauges(kv_usage=0.97), 260, 300)
    assert limit.limit == pytest.approx(234)
    limit.observe(122.0, gauges(kv_usage=0.8), 234, 300 + 234)
    assert limit.limit == pytest.approx(234), "a moment with less is not yet room"
    limit.observe(180.0, gauges(kv_usage=0.7), 234, 300 + 2 * 234)
    assert limit.limit == pytest.approx(234 + GROUP)
    limit.observe(240.0, gauges(kv_usage=0.4), 238, 300 + 2 * 234 + 238)
    assert limit.limit > 300, "much less full than at the cut: episodes have become shorter"


def test_requests_that_a_swap_of_weights_computes_again_are_no_sign() -> None:
    limit = started()
    assert limit.observe(1.0, gauges(preemptions=10, waiting=90), 100, 0, swapped=True) is None
    assert limit.observe(2.0, gauges(preemptions=10, waiting=60), 100, 0) is None
    assert limit.observe(1.0 + SETTLE_S + QUEUE_S - 1, gauges(preemptions=10, waiting=60), 100, 0) is None
    cut = limit.observe(1.0 + SETTLE_S + QUEUE_S, gauges(preemptions=10, waiting=60), 100, 0)
    assert cut is not None and cut.sign.cause == "queue"


def test_it_follows_replicas_and_starts_from_what_the_caches_hold_at_the_longest() -> None:
    one, two = gauges(kv_usage=0.9), [*gauges(kv_usage=0.9), EngineGauges(1, kv_usage=0.9, capacity=10_000)]
    limit = AdaptiveLimit(GROUP, 500)
    limit.observe(0.0, [EngineGauges(0)], 50, 0)
    assert limit.episodes is None, "an engine that does not say how large its cache is"
    limit.observe(1.0, one, 0, 0)
    assert limit.episodes == 20
    limit.observe(2.0, two, 20, 0)
    assert limit.episodes == 40
    limit.observe(3.0, [], 20, 0)
    assert limit.episodes == 40, "no engine at all is not a smaller one"
    limit.observe(4.0, one, 20, 0)
    assert limit.episodes == 20


# --- in the production loop ---------------------------------------------------------------------------------


class Fleet(FakeFleet):
    """One engine whose cache holds 100 tokens an episode, and so many of them."""

    runner: FakeRunner

    def __init__(self, room: int, *, capacity: int | None = None) -> None:
        super().__init__()
        self.room = room
        self.capacity = room * 100 if capacity is None else capacity

    def gauges(self) -> Sequence[EngineGauges]:
        running = min(self.runner.running, self.room)
        waiting = self.runner.running - running
        return [
            EngineGauges(
                0, kv_usage=running / self.room, running=running, waiting=waiting, capacity=float(self.capacity)
            )
        ]


async def no_save(step: int, data: bytes) -> None:
    pass


def looped(fleet: Fleet, *, updates: int = 40, **loop: object) -> tuple[LoopState, list[int]]:
    """A run over a fake engine; its state and how many episodes ran at once, second by second."""
    seen: list[int] = []

    def seconds(request: EpisodeRequest) -> float:
        return 4.0 + request.episode_id % 3

    async def main() -> LoopState:
        fleet.runner = FakeRunner(fleet, seconds=seconds)
        config = fake_config(steps=updates, groups_per_step=8, group_size=GROUP, **loop)
        state = fake_state(config, runner=fleet.runner, trainer=FakeTrainer(lambda: 0.5), fleet=fleet)
        task = asyncio.create_task(Loop(state, no_save).run())
        while not task.done():
            await asyncio.sleep(1)
            seen.append(fleet.runner.running)
        await task
        return state

    return clock.run(main(), limit_s=1e5), seen


def test_a_run_finds_how_much_its_engine_holds_and_loses_nothing() -> None:
    state, seen = looped(Fleet(room=48), max_staleness=8, max_concurrency="auto")
    unlimited, most = looped(Fleet(room=48), max_staleness=8, max_concurrency=0)
    assert max(most) > 100 and unlimited.concurrency_limit is None
    settled = seen[len(seen) // 2 : -10]
    assert sum(settled) / len(settled) >= 0.7 * 48 and max(seen) <= 1.1 * 48
    counts = state.ledger.counts()
    assert not counts["failed"] and set(counts["dropped"]) <= {"no_signal"}, "it never cancels"
    limits = [line["loop/concurrency_limit"] for _, line in state.sink.lines]  # type: ignore[attr-defined]
    assert limits[0] < 0.5 * 48 and max(limits) <= 1.1 * 48


def test_a_full_engine_is_said_in_the_events_and_by_who_waits_for_it() -> None:
    """It starts with what the cache holds at the longest; then the cache is half of what it was."""

    async def main() -> tuple[list[str], LoopState]:
        fleet = Fleet(room=16)
        fleet.runner = FakeRunner(fleet, seconds=lambda request: 30.0)
        config = fake_config(steps=20, groups_per_step=8, group_size=GROUP, max_staleness=4, max_concurrency="auto")
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"row_tokens": 100})})
        state = fake_state(config, runner=fleet.runner, fleet=fleet)
        task = asyncio.create_task(Loop(state, no_save).run())
        await asyncio.sleep(15)
        assert state.episodes_in_flight == 16
        await asyncio.sleep(30)
        lines = state.waits.describe()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return lines, state

    lines, state = clock.run(main())
    cuts = [data for kind, data in state.sink.events if kind == "concurrency_cut"]  # type: ignore[attr-defined]
    reason = "engine-0: its cache is 100% full (limit 95%)"
    assert cuts == [{"reason": reason, "before": 16, "after": 14}]
    (line,) = [line for line in lines if line.startswith("generate")]
    assert "generate waits for engine: 12 episodes in flight, and the most at once is 14" in line
    assert f"(loop.max_concurrency = 'auto'; {reason})" in line


def test_a_run_without_gauges_or_a_synchronous_one_has_no_adaptive_limit() -> None:
    silent, seen = looped(Fleet(room=48, capacity=0), updates=10, max_staleness=4, max_concurrency="auto")
    assert silent.concurrency_limit is None and max(seen) > 100
    synchronous, seen = looped(Fleet(room=4), updates=5, max_staleness=0, max_concurrency="auto")
    assert synchronous.concurrency_limit is None and max(seen) == 8 * GROUP
    assert not any("loop/concurrency_limit" in line for _, line in synchronous.sink.lines)  # type: ignore[attr-defined]
