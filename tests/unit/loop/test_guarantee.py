"""The guarantee: whatever is slow, fails, dies or restarts, no token older than K is trained, and no schedule hangs.

The production loops run with fakes on a virtual clock. Every schedule has a seed; `PRL_SCHEDULES` runs more of them.
"""

from __future__ import annotations

import os

import pytest

from prl.testing import clock

from .helpers import World

SCHEDULES = int(os.environ.get("PRL_SCHEDULES", "3000"))
BLOCK = 250


@pytest.mark.parametrize("block", range(SCHEDULES // BLOCK))
def test_no_schedule_breaks_the_guarantee(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        world = World(seed)
        kills = seed % 4 if seed % 2 else 0
        if kills:
            world.config = world.config.model_copy(
                update={"checkpoint": world.config.checkpoint.model_copy(update={"every": 1 + seed % 3})}
            )
        state = clock.run(world.run(kills), limit_s=1e6)
        loop = world.config.loop
        assert state.version == loop.steps, f"seed {seed}: the run did not finish"
        assert set(world.trained) == set(range(1, loop.steps + 1)), f"seed {seed}: a step is missing or twice"
        for step, samples in world.trained.items():
            for min_version, _ in samples:
                staleness = step - 1 - min_version
                assert 0 <= staleness <= loop.max_staleness, f"seed {seed}: staleness {staleness} at step {step}"
        counts = state.ledger.counts()
        settled = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["failed"].values())
        assert counts["dispatched"] == settled + counts["pending"], f"seed {seed}"
        assert state.staleness_max <= loop.max_staleness


def test_long_rollouts_are_not_starved_by_redraws() -> None:
    """One task takes 50 times as long as the others: with `straggler = "wait"` it is trained, never dropped."""
    for seed in range(20):
        world = World(seed)
        world.failure = 0.0
        world.speed = dict.fromkeys(world.speed, 0.3)
        world.config = world.config.model_copy(
            update={"loop": world.config.loop.model_copy(update={"steps": 9, "straggler": "wait", "max_staleness": 1})}
        )
        world.seconds = lambda request: 50.0 if request.task.id == "train-3" else 1.0  # type: ignore[method-assign]
        state = clock.run(world.run(), limit_s=1e6)
        assert state.ledger.counts()["dropped"].get("stale", 0) == 0
        assert len(world.episodes) == 9
