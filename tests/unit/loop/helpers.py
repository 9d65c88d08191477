"""One random schedule of the production loop over fakes, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

import msgspec

from prl.config.schema import RunConfig
from prl.errors import EpisodeFailed
from prl.loop import snapshot
from prl.loop.snapshot import Snapshot
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.messages import EngineGauges, EpisodeRequest
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state


@dataclass
class World:
    """Random but repeatable: delays of every role, failures, long rollouts, a run that may be killed and resumed."""

    seed: int
    config: RunConfig = field(init=False)
    saved: dict[int, bytes] = field(default_factory=dict)
    trained: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    episodes: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = r = random.Random(self.seed)
        self.failure = r.choice([0.0, 0.0, 0.1, 0.3])
        self.heavy = r.random() < 0.5
        self.speed = {role: r.choice([0.01, 0.3, 1.0, 3.0]) for role in ("engine", "trainer", "install")}
        self.config = fake_config(
            steps=r.choice([1, 2, 5, 9]),
            groups_per_step=r.choice([1, 2, 4]),
            group_size=r.choice([2, 3]),
            max_staleness=r.choice([0, 0, 1, 2, 4]),
            straggler=r.choice(["wait", "wait", "drop"]),
            max_concurrency=r.choice([0, "auto", 1, 5]),
        )
        trainer = self.config.trainer.model_copy(update={"updates_per_batch": 1 + self.seed % 3})
        self.config = self.config.model_copy(update={"trainer": trainer})

    def seconds(self, request: EpisodeRequest) -> float:
        long = 30 if self.heavy and self.random.random() < 0.05 else 1
        return self.random.expovariate(1 / self.speed["engine"]) * long

    def fails(self, request: EpisodeRequest) -> EpisodeFailed | None:
        if self.random.random() < self.failure:
            return EpisodeFailed(self.random.choice(["lost", "broken"]), retryable=self.random.random() < 0.5)
        return None

    def gauges(self) -> list[EngineGauges]:
        """Engines that say anything: it may slow a run with an adaptive limit down, and break nothing."""
        r = self.random
        return [
            EngineGauges(
                replica, r.random(), r.randint(0, 40), r.randint(0, 20), r.randint(0, 99), 10_000, r.random() * 8
            )
            for replica in range(r.randint(0, 2))
        ]

    def start(self) -> tuple[Loop, LoopState, FakeTrainer]:
        """A new process, continuing from the newest snapshot if there is one."""
        fleet = FakeFleet(lambda: self.random.expovariate(1 / self.speed["install"]))
        fleet.gauges = self.gauges  # type: ignore[method-assign]
        seconds = lambda: self.random.expovariate(1 / self.speed["trainer"])  # noqa: E731
        trainer = FakeTrainer(seconds, dp_size=1 + self.seed % 2)
        runner = FakeRunner(fleet, seconds=self.seconds, fails=self.fails, num_tasks=50)
        state = fake_state(self.config, runner=runner, trainer=trainer, fleet=fleet)
        step = max(self.saved, default=0)
        if self.saved:
            snapshot.restore(state, self.saved[step])
            trainer.version = step
        # What was done after the checkpoint is lost with the process, and done again.
        self.trained = {s: rows for s, rows in self.trained.items() if s <= step}
        self.episodes = {s: ids for s, ids in self.episodes.items() if s <= step}

        async def save(step: int, data: bytes) -> None:
            await asyncio.sleep(self.random.expovariate(5))
            self.saved[step] = data

        state.sink.group = self._book(state)  # type: ignore[method-assign]
        return Loop(state, save), state, trainer

    def _book(self, state: LoopState):  # type: ignore[no-untyped-def]
        def group(group, step, fate):  # type: ignore[no-untyped-def]
            if step is not None:
                used = {sample.episode_id for sample in group.samples}
                assert not used & set().union(*self.episodes.values(), set()), "a sample was trained twice"
                self.episodes.setdefault(step, set()).update(used)

        return group

    async def run(self, kills: int = 0) -> LoopState:
        """Run to the end, killed up to `kills` times at random moments."""
        while True:
            loop, state, trainer = self.start()
            task = asyncio.create_task(loop.run())
            audit = asyncio.create_task(self.audit(state))
            if kills:
                kills -= 1
                await asyncio.wait([task], timeout=self.random.uniform(0, 20))
                if not task.done():
                    task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if audit.done():
                audit.result()  # what it found
            audit.cancel()
            self.trained.update(trainer.trained)
            if not task.cancelled():
                return state

    async def audit(self, state: LoopState) -> None:
        """At every moment the ledger's pending episodes are exactly those that exist somewhere in the loop."""
        while True:
            await asyncio.sleep(self.random.uniform(0.01, 1))
            groups = [*state.in_flight.values(), *state.finished, *state.ready.values()]
            for batch in [*state.formed, *([state.training] if state.training else [])]:
                groups.extend(batch.groups)
            settled = sum(len(group.failures) for group in groups)
            assert state.ledger.pending == sum(group.size for group in groups) - settled
            assert len(state.formed) <= 1, "more than one batch waits in front of the trainer"


def decode(data: bytes) -> Snapshot:
    return msgspec.msgpack.decode(data, type=Snapshot)
