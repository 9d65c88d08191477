"""max_staleness = 0: what is trained, and what is reported, depends on the seed and on nothing that a clock decides.

Episodes fail and groups bring no signal by the seed of the schedule; how long anything takes, and when the process is
killed, differs from run to run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from prl.errors import EpisodeFailed, RunFailed
from prl.loop import snapshot
from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest, TrainBatch, TrainReport
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state, samples_of

Trained = dict[int, list[Any]]


class Recording(FakeTrainer):
    def __init__(self, seconds: Any, trained: Trained) -> None:
        super().__init__(seconds, keep=False)
        self._into = trained

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        samples = [(s.header, s.credit, s.body) for s in samples_of(batches)]
        self._into[batches[0].step] = [[update.denominators for update in batches[0].updates], samples]
        return await super().train(batches)


class Schedule:
    """`seed` decides what happens, `timing` when."""

    def __init__(self, seed: int, timing: int) -> None:
        what = random.Random(seed)
        self.when = random.Random(f"{seed}/{timing}")
        self.failing = what.choice([0, 0.2, 0.4])
        self.easy = what.choice([0, 0.3])
        self.config = fake_config(
            steps=what.choice([2, 4]),
            groups_per_step=what.choice([1, 2, 4]),
            group_size=what.choice([2, 3]),
            max_staleness=0,
            max_concurrency=what.choice([0, 0, 3, 6]),
            straggler=what.choice(["wait", "drop"]),
            max_redraws=what.choice([0, 2]),
            max_empty_batches=30,
        )
        tables = {
            "eval": self.config.eval.model_copy(update={"tasks": what.choice([0, 5]), "every": what.choice([0, 1, 2])}),
            "checkpoint": self.config.checkpoint.model_copy(update={"every": 1}),
        }
        self.config = self.config.model_copy(update=tables)
        self.trained: Trained = {}
        self.saved: dict[int, bytes] = {}

    def seconds(self, request: object = None) -> float:
        return self.when.expovariate(1)

    def fails(self, request: EpisodeRequest) -> EpisodeFailed | None:
        return EpisodeFailed("env_error") if random.Random(f"fails {request.seed}").random() < self.failing else None

    def reward(self, request: EpisodeRequest) -> float:
        if random.Random(f"easy {request.task.id}").random() < self.easy:
            return 1.0
        return random.Random(request.seed).choice([0.1, 0.2, 0.3, 0.7])

    async def save(self, step: int, data: bytes) -> None:
        self.saved[step] = data
        await asyncio.sleep(self.seconds())

    async def run(self, kills: int) -> tuple[Trained, list[Any], dict[str, Any]]:
        while True:
            fleet = FakeFleet(self.seconds)
            trainer = Recording(self.seconds, self.trained)
            runner = FakeRunner(fleet, seconds=self.seconds, fails=self.fails, reward=self.reward, num_tasks=30)
            state = fake_state(self.config, runner=runner, trainer=trainer, fleet=fleet)
            if self.saved:
                trainer.version = max(self.saved)
                snapshot.restore(state, self.saved[trainer.version])
            task = asyncio.create_task(Loop(state, self.save).run())
            if kills:
                kills -= 1
                await asyncio.wait([task], timeout=self.when.uniform(0, 25))
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    continue
            await task
            reported = [(step, _computed(values)) for step, values in state.sink.lines]  # type: ignore[attr-defined]
            return self.trained, reported, state.ledger.counts()


def _computed(values: dict[str, float]) -> dict[str, float]:
    timed = ("time/", "loop/", "eval/seconds")
    return {name: value for name, value in values.items() if not name.startswith(timed)}


def result(seed: int, timing: int, kills: int = 0) -> tuple[Trained, list[Any], dict[str, Any]] | None:
    """None when the run ended because too little of it could be trained, which is for the seed to say as well."""
    try:
        return clock.run(Schedule(seed, timing).run(kills), limit_s=1e6)
    except RunFailed:
        return None


def test_two_runs_of_one_seed_are_the_same_however_long_anything_takes() -> None:
    finished = 0
    for seed in range(150):
        first = result(seed, timing=0)
        assert first == result(seed, timing=1), f"seed {seed}"
        finished += first is not None
    assert finished > 120


def test_a_run_that_was_killed_trains_what_it_would_have_trained() -> None:
    for seed in range(150):
        whole, killed = result(seed, timing=0), result(seed, timing=2, kills=2)
        if whole is not None and killed is not None:
            assert (whole[0], whole[2]) == (killed[0], killed[2]), f"seed {seed}"
