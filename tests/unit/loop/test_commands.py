"""Pause, resume, checkpoint, evaluate and stop at any moment, kills in between: a run that is resumed until it is done
trains every step once and keeps the bound, and a stop is always saved."""

from __future__ import annotations

import asyncio

from prl.loop.state import LoopState
from prl.testing import clock

from .helpers import World


class Commanded(World):
    """Somebody asks for one thing after another, evaluations are short, long or cut off."""

    commands: asyncio.Task[None]

    def start(self):  # type: ignore[no-untyped-def]
        choose = self.random.choice
        evaluation = {"tasks": choose([0, 3, 80]), "every": choose([0, 1, 2]), "timeout_s": choose([0.5, 1000.0])}
        tables = {
            "eval": self.config.eval.model_copy(update=evaluation),
            "checkpoint": self.config.checkpoint.model_copy(update={"every": choose([0, 1, 3])}),
        }
        self.config = self.config.model_copy(update=tables)
        loop, state, trainer = super().start()
        self.commands = asyncio.create_task(self._command(state))
        return loop, state, trainer

    async def _command(self, state: LoopState) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(0.7))
            match self.random.choice(["pause", "resume", "resume", "checkpoint", "checkpoint", "evaluate", "stop"]):
                case "pause":
                    state.paused = "as asked for"
                case "resume":
                    state.paused = ""
                case "checkpoint":
                    state.checkpoint_requested = True
                case "evaluate":
                    state.evaluate_requested = True
                case "stop" if self.random.random() < 0.2:
                    state.stopping = True
            state.signal.notify()

    async def until_done(self, kills: int) -> LoopState:
        for _ in range(40):
            state = await self.run(kills)
            self.commands.cancel()
            assert max(self.saved) == state.version, "what was trained before a stop is not saved"
            if state.version >= state.steps:
                return state
        raise AssertionError("forty starts did not finish it")


def test_any_command_at_any_moment() -> None:
    for seed in range(150):
        world = Commanded(seed)
        state = clock.run(world.until_done(kills=seed % 3), limit_s=1e6)
        assert sorted(world.trained) == list(range(1, state.steps + 1)), f"seed {seed}"
        ages = [step - 1 - version for step, rows in world.trained.items() for version, _ in rows]
        assert 0 <= min(ages) <= max(ages) <= world.config.loop.max_staleness, f"seed {seed}"
        counts = state.ledger.counts()
        settled = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["failed"].values())
        assert counts["dispatched"] == settled + counts["pending"], f"seed {seed}"
