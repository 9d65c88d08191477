"""The half of the wire in the engine's process: handlers over a `Backend`, and its heartbeats.

The event loop only moves messages; what computes tokens is the backend's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import Any

import msgspec

from prl import faults
from prl.engine import methods
from prl.engine.backend import Backend, Result, SleepingBackend
from prl.engine.methods import Failure
from prl.errors import WeightsError, WireError
from prl.faults import InjectedFault
from prl.messages import NOTHING, EngineHealth, Generation, Installed, Nothing, WeightsRef
from prl.role import RoleProcess
from prl.wire import Handlers, Peer

log = logging.getLogger(__name__)

REPORT_S = 0.5


class EngineServer:
    """It must be made inside the running event loop that its handlers run on."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.paused = False
        self.asleep = False
        self._pausing = asyncio.Lock()
        self._installing = asyncio.Lock()
        self._installed: tuple[WeightsRef, Installed] | None = None
        """The last one and what was answered, if nothing went wrong since."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        backend.start(self._deliver)

    def handlers(self) -> Handlers:
        return {
            methods.GENERATE: self._generate,
            methods.ABORT: self._abort,
            methods.SCORE: self._score,
            methods.PAUSE: self._pause,
            methods.INSTALL: self._install,
            methods.RESUME: self._resume,
            methods.SLEEP: self._sleep,
            methods.WAKE: self._wake,
            methods.HEALTH: self._health,
        }

    async def report(self, process: RoleProcess) -> None:
        """Keep `process.busy`, `doing` and `gauges`, which its heartbeats carry, up to date until cancelled."""
        while True:
            backend = self.backend
            load = backend.load
            process.busy = backend.busy
            process.doing = f"generating {load} requests" if load else "waiting for requests"
            if self.asleep:
                process.doing = "asleep while the trainer trains"
            process.doing = str(backend.info().get("installing") or process.doing)
            process.gauges = self.gauges()
            await asyncio.sleep(REPORT_S)

    def gauges(self) -> dict[str, float]:
        """What a heartbeat carries."""
        backend = self.backend
        return {"version": float(backend.version), "load": float(backend.load), **backend.gauges()}

    def close(self) -> None:
        self.backend.close()

    # --- generation -----------------------------------------------------------------------------------------

    def _generate(self, peer: Peer, batch: methods.GenerateBatch) -> Nothing:
        accepted = []
        for request in batch.requests:
            try:
                faults.point("engine.generate")
            except InjectedFault as error:
                self._answer([Result((peer, request.id), None, Failure("", str(error), retryable=True))])
                continue
            accepted.append(((peer, request.id), request))
        if accepted:
            self.backend.add(accepted)
        return NOTHING

    def _abort(self, peer: Peer, batch: methods.AbortBatch) -> Nothing:
        self.backend.abort([(peer, request_id) for request_id in batch.ids])
        return NOTHING

    def _deliver(self, results: list[Result]) -> None:
        if threading.get_ident() == self._thread:
            self._answer(results)
            return
        try:
            self._loop.call_soon_threadsafe(self._answer, results)
        except RuntimeError:
            log.debug("the loop is closed: %d results are dropped", len(results))

    def _answer(self, results: list[Result]) -> None:
        by_peer: dict[Any, list[methods.Finished]] = {}
        for result in results:
            peer, request_id = result.key
            generation = _sendable(_spoiled(result.generation))
            by_peer.setdefault(peer, []).append(methods.Finished(request_id, generation, result.failure))
        for peer, finished in by_peer.items():
            peer.notify(methods.FINISHED, methods.FinishedBatch(finished))

    # --- control --------------------------------------------------------------------------------------------

    async def _score(self, peer: Peer, request: methods.ScoreRequest) -> methods.ScoreReply:
        return methods.ScoreReply(await self.backend.score(request.sequences))

    async def _pause(self, peer: Peer, request: Nothing) -> Nothing:
        async with self._pausing:
            if not self.paused:
                await self.backend.pause()
                self.paused = True
        return NOTHING

    async def _resume(self, peer: Peer, request: Nothing) -> Nothing:
        async with self._pausing:
            if self.paused:
                await self.backend.resume()
                self.paused = False
        return NOTHING

    async def _sleep(self, peer: Peer, request: Nothing) -> Nothing:
        async with self._installing, self._pausing:
            if not self.asleep:
                await self._sleeper().sleep()
                self.asleep = True
        return NOTHING

    async def _wake(self, peer: Peer, request: Nothing) -> Nothing:
        async with self._installing, self._pausing:
            if self.asleep:
                await self._sleeper().wake()
                self.asleep = False
        return NOTHING

    def _sleeper(self) -> SleepingBackend:
        if not isinstance(self.backend, SleepingBackend):
            raise WireError("this engine cannot free its GPU's memory while it runs: set engine.sleep = false")
        return self.backend

    async def _install(self, peer: Peer, weights: WeightsRef) -> Installed:
        """One at a time, in the order asked for. What is installed already is not installed again: its acknowledgement
        was lost."""
        async with self._installing:
            if weights.incarnation < self.backend.incarnation:
                raise WeightsError(
                    f"version {weights.version} is of incarnation {weights.incarnation} of the trainer, and this "
                    f"engine has heard of incarnation {self.backend.incarnation}"
                )
            if self._installed is None or self._installed[0] != weights:
                self._installed = None
                self._installed = weights, await self.backend.install(weights)
            return self._installed[1]

    def _health(self, peer: Peer, request: Nothing) -> EngineHealth:
        backend = self.backend
        return EngineHealth(
            backend.version,
            backend.incarnation,
            self.paused or self.asleep,
            backend.load,
            backend.busy,
            backend.info(),
        )


def _spoiled(generation: Generation | None) -> Generation | None:
    """The same, unless fault injection makes this engine one that does not know what it computed."""
    try:
        faults.point("engine.logprobs")
    except InjectedFault:
        if generation is not None:
            return msgspec.structs.replace(generation, logprobs=[math.nan] * len(generation.logprobs))
    return generation


def _sendable(generation: Generation | None) -> Generation | None:
    """A log-probability that is None, which an inference library may give, would make the message unreadable, and with
    it every answer that it carries. As NaN it fails that turn alone."""
    if generation is None or None not in generation.logprobs:
        return generation
    return msgspec.structs.replace(
        generation, logprobs=[math.nan if value is None else value for value in generation.logprobs]
    )
