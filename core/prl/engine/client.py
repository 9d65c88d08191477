"""The engine as the gateway and the controller see it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from prl.engine import methods
from prl.errors import EpisodeFailed, WireError
from prl.messages import NOTHING, EngineHealth, GenerateRequest, Generation, Installed, Nothing, WeightsRef
from prl.wire import Client

CONTROL_TIMEOUT_S = 60.0
SLEEP_TIMEOUT_S = 300.0
"""Weights travel between the GPU and the host."""
SCORE_TIMEOUT_S = 600.0
"""Forward passes over what is asked, behind what is computed already."""
INSTALL_TIMEOUT_S = 36_000.0
"""The controller's own deadline, engine.install_timeout_s, comes first."""


class WireEngineClient:
    """An `EngineClient`. It must be made inside a running event loop.

    When the connection breaks, every request in flight ends at once with `WireError`, and so does every later one.
    """

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._outbox: list[GenerateRequest] = []
        self._loop = asyncio.get_running_loop()
        self._wire = Client(
            address,
            token,
            {methods.FINISHED: self._on_finished},
            name=f"engine at {address}",
            on_lost=self._on_lost,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample a completion. Cancelling the call aborts the request.

        Raises:
            WireError: the engine is gone. EpisodeFailed: this request cannot be answered.
        """
        if self._wire.peer.closed:
            raise WireError(f"{self._wire.peer.name} is gone")
        if request.id in self._waiting:
            raise EpisodeFailed("bad_request", f"a request {request.id!r} is in flight already")
        future: asyncio.Future[Generation] = self._loop.create_future()
        self._waiting[request.id] = future
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            if not self._wire.peer.closed:
                self._wire.notify(methods.ABORT, methods.AbortBatch([request.id]))
            raise
        finally:
            self._waiting.pop(request.id, None)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        request = methods.ScoreRequest([list(sequence) for sequence in sequences])
        return (await self._wire.call(methods.SCORE, request, timeout=SCORE_TIMEOUT_S)).logprobs

    async def pause(self) -> None:
        await self._wire.call(methods.PAUSE, NOTHING, timeout=CONTROL_TIMEOUT_S)

    async def install(self, weights: WeightsRef) -> Installed:
        return await self._wire.call(methods.INSTALL, weights, timeout=INSTALL_TIMEOUT_S)

    async def resume(self) -> None:
        await self._wire.call(methods.RESUME, NOTHING, timeout=CONTROL_TIMEOUT_S)

    async def sleep(self) -> None:
        await self._wire.call(methods.SLEEP, NOTHING, timeout=SLEEP_TIMEOUT_S)

    async def wake(self) -> None:
        await self._wire.call(methods.WAKE, NOTHING, timeout=SLEEP_TIMEOUT_S)

    async def health(self) -> EngineHealth:
        return await self._wire.call(methods.HEALTH, NOTHING, timeout=CONTROL_TIMEOUT_S)

    async def close(self) -> None:
        self._fail_all("this end is closed")
        self._wire.close()

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        batch = [request for request in batch if request.id in self._waiting]
        if batch and not self._wire.peer.closed:
            self._wire.notify(methods.GENERATE, methods.GenerateBatch(batch))

    def _on_finished(self, peer: Any, message: methods.FinishedBatch) -> Nothing:
        for result in message.results:
            future = self._waiting.get(result.id)
            if future is None or future.done():
                continue
            if result.generation is not None:
                future.set_result(result.generation)
            else:
                future.set_exception(_error(result.failure))
        return NOTHING

    def _on_lost(self) -> None:
        self._fail_all("the connection is lost")

    def _fail_all(self, why: str) -> None:
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(WireError(f"{self._wire.peer.name}: {why}"))


def _error(failure: methods.Failure | None) -> Exception:
    if failure is None:
        return WireError("the engine answered a request with nothing")
    if not failure.reason:
        return WireError(failure.message)
    return EpisodeFailed(failure.reason, failure.message, retryable=failure.retryable)
