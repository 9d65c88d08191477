"""The publish loop.

Consumes: `refs`, one per trained version. Waits for: one, and for the engines to install it. Unblocked by: the train
loop. Produces: engines at a newer version, which is what admission waits for.

Only the newest version is installed; older ones that came meanwhile are skipped, with an event that says so, and
released without having been installed: a slow engine never holds up the trainer. A version is released, and may be
deleted, after every serving engine holds a newer one and none reads it.
"""

from __future__ import annotations

import asyncio

import msgspec

from prl.errors import RunFailed, WeightsError
from prl.loop.evaluate import Evaluator
from prl.loop.mismatch import probe_metrics
from prl.loop.state import LoopState
from prl.loop.waits import within
from prl.messages import WeightsRef


class Publisher:
    def __init__(self, state: LoopState, evaluator: Evaluator) -> None:
        self._state = state
        self._evaluator = evaluator
        self._installed: WeightsRef | None = None
        self._former: list[int] = []
        """Versions that are to be released."""

    async def run(self) -> None:
        """Install until the last version is trained. The last one is installed too: the final evaluation needs it."""
        state = self._state
        while not (state.done and not state.refs):
            if state.refs:
                await self._install_newest()
            else:
                with state.waits.on("publish", "train", f"version {state.version + 1} is not trained yet"):
                    await state.signal.wait()

    async def first(self) -> None:
        """Bring every engine to the version the run starts with, before anything is dispatched."""
        state = self._state
        timeout = state.config.loop.step_timeout_s
        what = f"publishing version {state.version}"
        with state.waits.on("publish", "trainer", what, timeout):
            state.refs.append(await within(state.roles.trainer.publish(state.version), timeout, what, "trainer"))
        await self._install_newest()

    async def _install_newest(self) -> None:
        state = self._state
        *skipped, ref = state.refs
        state.refs.clear()
        started = asyncio.get_running_loop().time()
        if skipped:
            state.sink.event("weights_skipped", versions=[other.version for other in skipped], newest=ref.version)
        evaluate = self._evaluator.due_before_generation(ref.version)
        state.admission_closed = evaluate
        timeout = state.config.loop.step_timeout_s
        with state.waits.on("publish", "engine", f"installing version {ref.version}", timeout):
            try:
                installing = state.roles.fleet.install(ref)
                found = await within(installing, timeout, f"installing version {ref.version}", "engine")
            except WeightsError as error:
                raise RunFailed(f"version {ref.version} was refused: {error}", log="logs/engine-0.log") from error
        self._former += [other.version for other in skipped]
        if self._installed is not None:
            self._former.append(self._installed.version)
        self._installed = ref
        seconds = asyncio.get_running_loop().time() - started
        what = {"version": ref.version, "bytes": ref.num_bytes, "adapter": ref.adapter}
        state.sink.event("weights_installed", seconds=round(seconds, 4), **what, **msgspec.structs.asdict(found))
        if values := probe_metrics(found):
            state.sink.metrics(ref.version, values)
        await self._release()
        state.progress = asyncio.get_running_loop().time()
        if evaluate:
            await self._evaluator.evaluate(ref.version)
            state.admission_closed = False
        state.signal.notify()

    async def _release(self) -> None:
        """What an engine that joins is still reading stays until the next time."""
        reading = self._state.roles.fleet.reading()
        old = [version for version in self._former if version not in reading]
        self._former = [version for version in self._former if version in reading]
        if old:
            await self._state.roles.trainer.release(old)
