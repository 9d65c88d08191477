"""Adaptive concurrency: how many episodes may be in flight at once, by what the engines say of their caches.

A request holds room in its engine's cache of keys and values until it ends, and how much it will need is not known
when it starts. Too few requests leave the engine idle; too many and it preempts: it throws a request's cache away and
computes it again. `AdaptiveLimit` is a pure state machine in between, with additive increase and multiplicative
decrease (Chiu and Jain 1989, "Analysis of the increase and decrease algorithms for congestion avoidance"), as TCP has
it (Jacobson 1988, "Congestion Avoidance and Control"):

start   as many episodes as the caches hold at their longest: no growth of theirs can overflow it
grow    while every engine has room and the limit is what holds admission back; counted in rounds, as many completed
        episodes as the limit, so that the caches show what the growth before has brought. A round makes half of the way
        to where they would be full to `GROW_BELOW`, twofold at most; near to where the last cut was by no more than a
        group
hold    the fullest cache is above `GROW_BELOW`, now or in the mean of the last seconds
cut     it is above that in the mean and above `CUT_ABOVE` now; requests are preempted; or a queue stays. Work is never
        cancelled: nothing new is admitted until enough has ended, and until then, and `COOLDOWN_S` more, there is no
        second cut. Requests that are computed again because the weights were swapped are no sign of anything

Engines that do not say how large their cache is are left to staleness alone. The limit follows replicas that come and
go in proportion to their caches. At least one group is always allowed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prl.config.schema import RunConfig
from prl.loop.state import LoopState
from prl.messages import EngineGauges
from prl.model_config import model_context

GROW_BELOW = 0.85
"""Share of a cache in use. Requests grow after they are admitted: the room above is for those in flight."""
CUT_ABOVE = 0.95
SMOOTHED_S = 10.0
"""Over which the mean of a cache's use is taken: a moment with less is no room to grow into."""
PREEMPTED_SHARE = 0.02
"""Preempted requests, as a share of those that have ended lately and those that run."""
LATELY_S = 60.0
QUEUE_SHARE = 0.25
"""Requests that wait, as a share of those that run, from which a queue is one. Admission comes in bursts."""
QUEUE_S = 5.0
"""A queue that stays so long is more than a burst."""
MOST_GROWTH = 2.0
"""A round. Faster outruns the caches, which fill for as long as an episode takes."""
NEAR = 0.8
"""Share of where the last cut was from which growth is careful ..."""
CAREFUL = 0.05
"""... a round; by no more than a group."""
FORGET = 0.6
"""A cache that is less full than this share of what it was at the last cut: episodes have become shorter since."""
CUTS = {"cache": 0.9, "preemption": 0.85, "queue": 0.9}
"""What a cut leaves of the limit."""
COOLDOWN_S = 5.0
SETTLE_S = 3.0
"""After a swap of weights, before preemptions and queues mean anything again."""
FRESH_S = 5.0
"""A heartbeat comes once a second. Older ones say nothing of what has been admitted since."""
PERIOD_S = 1.0

Cause = Literal["cache", "preemption", "queue"]


class Sign(NamedTuple):
    """Something that speaks for a cut: an engine shows `value`, past `threshold`."""

    cause: Cause
    engine: EngineGauges
    value: float
    threshold: float

    def __str__(self) -> str:
        what = {
            "cache": f"its cache is {self.value:.0%} full",
            "preemption": f"{self.value:.0%} of its requests were preempted",
            "queue": f"{self.value:.0%} as many requests wait as run, for {QUEUE_S:g} s",
        }[self.cause]
        return f"engine-{self.engine.replica}: {what} (limit {self.threshold:.0%})"


@dataclass(frozen=True)
class Cut:
    """The limit fell, and why."""

    sign: Sign
    before: int
    after: int


@dataclass
class _Memory:
    """What has to be remembered of one engine between two looks."""

    preemptions: float
    queued_since: float
    lost: float = 0.0  # requests preempted, and episodes ended, lately
    ended: float = 0.0

    def signs(self, now: float, engine: EngineGauges, *, passed: float, done: float, settled: float) -> Iterator[Sign]:
        running = max(1.0, engine.running)
        lost, self.preemptions = engine.preemptions - self.preemptions, engine.preemptions
        fade = math.exp(-passed / LATELY_S)
        self.lost = self.lost * fade + (max(0.0, lost) if now >= settled else 0.0)
        self.ended = self.ended * fade + done
        share = self.lost / (self.ended + running)
        if share > PREEMPTED_SHARE:
            yield Sign("preemption", engine, share, PREEMPTED_SHARE)
        queue = engine.waiting / running
        if queue <= QUEUE_SHARE or now < settled:
            self.queued_since = max(now, settled)
        elif now - self.queued_since >= QUEUE_S:
            yield Sign("queue", engine, queue, QUEUE_SHARE)


@dataclass
class AdaptiveLimit:
    """The limit, moved by `observe`.

    Args:
        group: episodes that are started together; the limit never falls below it.
        episode_tokens: cached tokens that one episode needs at most.
        limit: None until an engine says how large its cache is: there is none.
    """

    group: int
    episode_tokens: int
    limit: float | None = None
    last_cut: Cut | None = None
    _mean: float = 0.0  # use of the fullest cache, over the last seconds
    _looked_at: float | None = None
    _capacity: float = 0.0
    _completed: int = 0
    _cut_at: float = math.inf  # episodes in flight at the last cut, and how full the cache was
    _cut_usage: float = 0.0
    _draining: bool = False
    _calm_at: float = 0.0  # earliest time of the next cut
    _settled_at: float = 0.0  # until then a swap of weights explains what engines show
    _memory: dict[int, _Memory] = field(default_factory=dict)

    @property
    def episodes(self) -> int | None:
        """How many may be in flight; None is no limit."""
        return None if self.limit is None else int(self.limit)

    def observe(
        self, now: float, gauges: Sequence[EngineGauges], in_flight: int, completed: int, *, swapped: bool = False
    ) -> Cut | None:
        """Look at the engines once.

        Args:
            now: seconds, on any clock that does not go back.
            gauges: of every serving engine.
            in_flight: episodes in flight.
            completed: episodes that have ended since the run began.
            swapped: weights are being installed, or were since the last look.

        Returns:
            The cut that was made, if one was.
        """
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        done, self._completed = max(0, completed - self._completed), completed
        self._settled_at = now + SETTLE_S if swapped else self._settled_at
        telling = [engine for engine in gauges if engine.capacity > 0]
        fresh = [engine for engine in telling if engine.age_s <= FRESH_S]
        self._follow(sum(engine.capacity for engine in telling))
        fullest = max((engine.kv_usage for engine in fresh), default=self._mean)
        weight = 1.0 if self._looked_at is None else -math.expm1(-passed / SMOOTHED_S)
        self._mean, self._looked_at = self._mean + (fullest - self._mean) * weight, now
        signs = [sign for engine in fresh for sign in self._signs(now, engine, passed, done / len(fresh))]
        if self.limit is None:
            return None
        if self._draining and in_flight <= self.limit:
            self._draining, self._calm_at = False, now + COOLDOWN_S
        if signs:
            return None if self._draining or now < self._calm_at else self._cut(signs, in_flight)
        held_back = in_flight + done >= self.limit - self.group  # before the first of them ended
        usage, all_known = max(fullest, self._mean), len(fresh) == len(gauges) > 0
        queueing = any(engine.waiting > QUEUE_SHARE * max(1.0, engine.running) for engine in fresh)
        if held_back and all_known and usage < GROW_BELOW and not queueing:
            self._grow(done, usage)
        return None

    def _follow(self, capacity: float) -> None:
        """The sum of the caches may be another one than before: replicas come and go."""
        if not capacity:
            return
        if self.limit is None:
            self.limit = max(float(self.group), capacity / self.episode_tokens)
        elif capacity != self._capacity and self._capacity:
            self.limit = max(float(self.group), self.limit * capacity / self._capacity)
            self._cut_at *= capacity / self._capacity
        self._capacity = capacity

    def _signs(self, now: float, engine: EngineGauges, passed: float, done: float) -> Iterator[Sign]:
        memory = self._memory.setdefault(engine.replica, _Memory(engine.preemptions, now))
        yield from memory.signs(now, engine, passed=passed, done=done, settled=self._settled_at)
        if engine.kv_usage > CUT_ABOVE and self._mean > GROW_BELOW:
            yield Sign("cache", engine, engine.kv_usage, CUT_ABOVE)

    def _cut(self, signs: Sequence[Sign], in_flight: int) -> Cut | None:
        assert self.limit is not None
        sign = min(signs, key=lambda sign: (CUTS[sign.cause], -sign.value))
        before = self.limit
        # What is in flight did this; a limit that was not reached had no part in it.
        self._cut_at, self._cut_usage = min(before, float(in_flight)), sign.engine.kv_usage
        self.limit = max(float(self.group), self._cut_at * CUTS[sign.cause])
        self._draining = True
        for memory in self._memory.values():
            memory.lost = 0.0
        if int(self.limit) == int(before):
            return None
        self.last_cut = Cut(sign, int(before), int(self.limit))
        return self.last_cut

    def _grow(self, done: int, usage: float) -> None:
        assert self.limit is not None
        rounds = min(1.0, done / self.limit)
        half = min(MOST_GROWTH, math.sqrt(GROW_BELOW / max(usage, 1e-3))) ** rounds * self.limit
        careful = self.limit + min(self.group, CAREFUL * self.limit) * rounds
        near = half > NEAR * self._cut_at and usage > FORGET * self._cut_usage
        self.limit = min(half, careful) if near else half


class Pacer:
    """Looks at the engines' gauges every `PERIOD_S` and sets `LoopState.concurrency`, by which groups are admitted. It
    does nothing in a run without an adaptive limit, a synchronous one among them."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._version = -1
        self._limit: AdaptiveLimit | None = None
        loop = state.config.loop
        if loop.max_concurrency == "auto" and loop.max_staleness:
            self._limit = AdaptiveLimit(loop.group_size, _longest(state.config))

    def look(self) -> None:
        """Once, at once: the first episodes are already admitted by it."""
        state, limit = self._state, self._limit
        if limit is None:
            return
        publishing, version = state.waits.of("publish"), state.roles.fleet.version
        swapped = version != self._version or (publishing is not None and publishing.owner == "engine")
        self._version = version
        before, now = limit.episodes, asyncio.get_running_loop().time()
        cut = limit.observe(
            now, state.roles.fleet.gauges(), state.episodes_in_flight, state.episodes_completed, swapped=swapped
        )
        state.concurrency = limit.episodes
        if cut is not None:
            state.concurrency_reason = str(cut.sign)
            state.sink.event("concurrency_cut", reason=str(cut.sign), before=cut.before, after=cut.after)
        if limit.episodes != before:
            state.signal.notify()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S if self._limit else 3600)  # the loop takes a helper that returns for a bug
            self.look()


def _longest(config: RunConfig) -> int:
    """Tokens of the longest episode that can be trained on, as far as it is known."""
    _, context = getattr(config.engine.plugin_config(), "context", ("", 0))
    return min(config.trainer.row_tokens, context or model_context(config.model.path) or config.trainer.row_tokens)
