"""The supervisor: brings the engines to the first version, runs the five loops and evaluation, and ends them together.

Shutdown is a protocol: the train loop ends first (all steps, or a stop), which makes `LoopState.done` true; every other
loop sees that and returns; episodes still in flight are cancelled and stay pending in the ledger. A loop that raises
ends the run with its error; one that returns while the run is not done is a bug, and an error too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from prl.errors import RunFailed
from prl.loop.batch import Batcher
from prl.loop.concurrency import Pacer
from prl.loop.evaluate import Evaluator
from prl.loop.generate import Generator
from prl.loop.publish import Publisher
from prl.loop.save import Save, Saver
from prl.loop.score import Scorer
from prl.loop.state import LoopState
from prl.loop.train import Trainer

log = logging.getLogger(__name__)


class Loop:
    """One run's loops over one `LoopState`. `run` may be awaited once."""

    def __init__(
        self, state: LoopState, save: Save, *, eval_first: float | None = None, eval_last: float | None = None
    ):
        self.state = state
        self.evaluator = Evaluator(state, state.version)
        self.evaluator.first, self.evaluator.last = eval_first, eval_last
        self.generator = Generator(state)
        self.publisher = Publisher(state, self.evaluator)
        self.saver = Saver(state, self.evaluator, save)
        self._pacer = Pacer(state)
        self._trainer = Trainer(state, self.saver.take, self.evaluator.on_step)

    async def run(self) -> None:
        """Run to the last step or to a stop.

        Raises:
            RunFailed: with the cause. Other exceptions are bugs.
        """
        state = self.state
        table = state.config.eval
        state.progress = asyncio.get_running_loop().time()
        await self._check_splits()
        await self.publisher.first()
        if table.at_start and self.evaluator.first is None:
            await self.evaluator.evaluate(state.version)
        await self._run_loops()
        if table.at_end and not state.stopping and state.steps:
            await self.evaluator.evaluate(state.version)
        if state.config.checkpoint.at_end or state.stopping or state.checkpoint_requested:
            await self.saver.take(state.version)
            await self.saver.finish()

    async def _check_splits(self) -> None:
        """Fail before the first step, not in the middle, when an environment has nothing to give."""
        state = self.state
        for env in state.config.envs:
            if state.steps and not await state.roles.runner.tasks(env.label, "train", 0, 1):
                raise RunFailed(f"environment {env.label!r} has no training task")

    async def _run_loops(self) -> None:
        """Until the run is done and nothing is left to save. When another loop fails, a checkpoint that is being
        written is completed first: its steps were good ones."""
        saving = asyncio.create_task(self.saver.run(), name="save")
        try:
            await self._until_done(saving)
            self.saver.end()
            await saving
        except Exception:
            self.saver.end()
            await asyncio.gather(saving, return_exceptions=True)
            raise
        finally:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)

    async def _until_done(self, saving: asyncio.Task[None]) -> None:
        state = self.state
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "generate": self.generator.run(),
            "score": Scorer(state).run(),
            "batch": Batcher(state).run(),
            "train": self._trainer.run(),
            "publish": self.publisher.run(),
            "evaluate": self.evaluator.run(),
        }
        tasks = {asyncio.create_task(coroutine, name=name) for name, coroutine in loops.items()}
        self._pacer.look()
        helpers = {asyncio.create_task(self._watch()), asyncio.create_task(self._pacer.run())}
        try:
            while tasks:
                done, _ = await asyncio.wait({*tasks, *helpers, saving}, return_when=asyncio.FIRST_COMPLETED)
                tasks -= done
                for task in done:
                    task.result()
                    if not state.done:
                        raise RunFailed(f"the {task.get_name()} loop ended while the run was not done: a bug in prl")
                state.signal.notify()
        finally:
            self.generator.stop()
            for task in (*tasks, *helpers):
                task.cancel()
            await asyncio.gather(*tasks, *helpers, return_exceptions=True)

    async def _watch(self) -> None:
        """Say who waits for whom when nothing has moved for `loop.stuck_after_s`."""
        state = self.state
        limit = state.config.loop.stuck_after_s
        reported = -1.0
        while True:
            await asyncio.sleep(limit / 4)
            idle = asyncio.get_running_loop().time() - state.progress
            if idle > limit and state.progress != reported and not state.paused:
                reported = state.progress
                lines = state.waits.describe()
                state.sink.event("stuck", seconds=round(idle, 1), waits=lines)
                log.warning("nothing has moved for %.0f s:\n  %s", idle, "\n  ".join(lines))
