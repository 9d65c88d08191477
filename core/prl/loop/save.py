"""The save loop: a checkpoint is written while training goes on.

Consumes: `taken`, the snapshot that the train loop took between two steps. Waits for: one, and for its files. Unblocked
by: the train loop, and the trainer's answer. Produces: a complete checkpoint. One is written at a time: the train loop
waits with the next until this one is complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prl.loop import snapshot
from prl.loop.evaluate import Evaluator
from prl.loop.state import LoopState, Taken
from prl.loop.waits import within

Save = Callable[[int, bytes], Awaitable[None]]
"""save(step, controller state): both parts of a checkpoint, the manifest last. The trainer's snapshot was taken."""


class Saver:
    def __init__(self, state: LoopState, evaluator: Evaluator, save: Save) -> None:
        self._state = state
        self._evaluator = evaluator
        self._save = save
        self._ending = False

    async def run(self) -> None:
        """Until `end`."""
        state = self._state
        while state.taken is not None or not self._ending:
            if state.taken is not None:
                await self.finish()
            else:
                with state.waits.on("save", "train", "no checkpoint was taken"):
                    await state.signal.wait()

    async def take(self, step: int) -> None:
        """Take the snapshot of both parts between two steps, once the former checkpoint is complete.

        Raises:
            RunFailed: the trainer did not take its part.
        """
        state = self._state
        while state.taken is not None:
            with state.waits.on("train", "save", f"the checkpoint of step {state.taken.step} is not complete yet"):
                await state.signal.wait()
        data = snapshot.take(state, self._evaluator.first, self._evaluator.last)
        timeout = state.config.loop.step_timeout_s
        what = f"the snapshot of step {step}"
        with state.waits.on("train", "trainer", what, timeout):
            await within(state.roles.trainer.snapshot(step), timeout, what, "trainer")
        state.taken = Taken(step, data)
        state.signal.notify()

    async def finish(self) -> None:
        """Write what was taken.

        Raises:
            StoreError, RunFailed: it could not be written. Earlier checkpoints are untouched.
        """
        state = self._state
        assert state.taken is not None
        try:
            await self._save(state.taken.step, state.taken.data)
        finally:
            state.taken = None
            state.signal.notify()

    def end(self) -> None:
        """No snapshot will be taken any more: return when the last one is complete."""
        self._ending = True
        self._state.signal.notify()
