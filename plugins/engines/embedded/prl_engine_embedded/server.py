"""The engine's process: answers the wire, holds the scheduler, installs weights.

The event loop only moves messages; tokens are computed in the scheduler's thread, weights are read in another.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from prl import faults
from prl.errors import PrlError, WeightsError
from prl.faults import InjectedFault
from prl.messages import NOTHING, EngineHealth, Generation, Nothing, WeightsRef
from prl.protocols import ChannelReceiver, ReceivedWeights
from prl.wire import Handlers, Peer
from prl_engine_embedded import methods
from prl_engine_embedded.methods import Failure
from prl_engine_embedded.model import LoadedModel
from prl_engine_embedded.scheduler import Result, Scheduler
from prl_engine_embedded.weights import Swap, check_probes

log = logging.getLogger(__name__)


class EngineServer:
    """The handlers, and the state that survives a request: which version is installed, whether it is paused."""

    def __init__(
        self, model: LoadedModel, scheduler: Scheduler, receiver: ChannelReceiver | None, *, recompute: bool = True
    ) -> None:
        self.version = 0
        self.incarnation = 0
        self.model = model
        self.scheduler = scheduler
        self._receiver = receiver
        self._recompute = recompute
        self._paused: ExitStack | None = None
        self._pausing = asyncio.Lock()
        self._installing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        scheduler.start(self._deliver_from_thread)

    def handlers(self) -> Handlers:
        return {
            methods.GENERATE: self._generate,
            methods.ABORT: self._abort,
            methods.SCORE: self._score,
            methods.PAUSE: self._pause,
            methods.INSTALL: self._install,
            methods.RESUME: self._resume,
            methods.HEALTH: self._health,
        }

    def close(self) -> None:
        if self._paused is not None:
            self._paused.close()
            self._paused = None
        self.scheduler.close()

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
            self.scheduler.add(accepted)
        return NOTHING

    def _abort(self, peer: Peer, batch: methods.AbortBatch) -> Nothing:
        self.scheduler.abort([(peer, request_id) for request_id in batch.ids])
        return NOTHING

    def _deliver_from_thread(self, results: list[Result]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._answer, results)
        except RuntimeError:
            log.debug("the loop is closed: %d results are dropped", len(results))

    def _answer(self, results: list[Result]) -> None:
        by_peer: dict[Any, list[methods.Finished]] = {}
        for result in results:
            peer, request_id = result.key
            generation = _spoiled(result.generation)
            by_peer.setdefault(peer, []).append(methods.Finished(request_id, generation, result.failure))
        for peer, finished in by_peer.items():
            peer.notify(methods.FINISHED, methods.FinishedBatch(finished))

    # --- control --------------------------------------------------------------------------------------------

    async def _score(self, peer: Peer, request: methods.ScoreRequest) -> methods.ScoreReply:
        def score() -> list[list[float]]:
            with self.scheduler.hold():
                return self.model.score(request.sequences)

        return methods.ScoreReply(await asyncio.to_thread(score))

    async def _pause(self, peer: Peer, request: Nothing) -> Nothing:
        async with self._pausing:
            if self._paused is None:
                stack = ExitStack()
                await asyncio.to_thread(stack.enter_context, self.scheduler.hold())
                self._paused = stack
        return NOTHING

    async def _resume(self, peer: Peer, request: Nothing) -> Nothing:
        async with self._pausing:
            if self._paused is not None:
                self._paused.close()
                self._paused = None
        return NOTHING

    def _health(self, peer: Peer, request: Nothing) -> EngineHealth:
        scheduler = self.scheduler
        info = {"tokens": scheduler.tokens, "batching": type(scheduler).__name__.removesuffix("Scheduler").lower()}
        return EngineHealth(
            self.version, self.incarnation, self._paused is not None, scheduler.load, scheduler.busy, info
        )

    # --- weights --------------------------------------------------------------------------------------------

    async def _install(self, peer: Peer, weights: WeightsRef) -> Nothing:
        """Read a version while generation goes on, then stop between two tokens, swap, verify, go on.

        A version that is installed already is installed again only for a newer incarnation of the trainer.
        """
        async with self._installing:
            if self._receiver is None:
                raise WeightsError("this engine was started without a weight channel")
            received = await asyncio.to_thread(self._receive, weights)
            await asyncio.to_thread(self._swap, weights, received)
        return NOTHING

    def _receive(self, weights: WeightsRef) -> ReceivedWeights:
        assert self._receiver is not None
        try:
            return self._receiver.receive(weights)
        except PrlError:
            raise
        except Exception as error:
            raise WeightsError(f"version {weights.version} cannot be read: {type(error).__name__}: {error}") from error

    def _swap(self, weights: WeightsRef, received: ReceivedWeights) -> None:
        with self.scheduler.hold(), self.model.lock, self._alone_on_the_device():
            swap = Swap(self.model.module)
            tensors = swap.fitted(received.tensors)
            try:
                swap.apply(tensors)
                faults.point("engine.install")
                difference = check_probes(self.model, received.probes, received.tolerance)
            except Exception as error:
                swap.rollback()
                if isinstance(error, WeightsError):
                    raise
                raise WeightsError(
                    f"version {weights.version} was not installed, version {self.version} still is: "
                    f"{type(error).__name__}: {error}"
                ) from error
            swap.commit()
            self.version = self.scheduler.version = weights.version
            self.incarnation = weights.incarnation
            self.scheduler.weights_changed(self._recompute)
        log.info("version %d installed, probes differ by %.2g", weights.version, difference)

    @contextmanager
    def _alone_on_the_device(self) -> Iterator[None]:
        """On a GPU, wait for every stream before and after: transformers' continuous batching computes on one of its
        own, which nothing else orders against copies made here."""
        import torch

        cuda = self.model.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.model.device)
        yield
        if cuda:
            torch.cuda.synchronize(self.model.device)


def _spoiled(generation: Generation | None) -> Generation | None:
    """The same, unless fault injection makes this engine one that does not know what it computed."""
    try:
        faults.point("engine.logprobs")
    except InjectedFault:
        if generation is not None:
            return msgspec.structs.replace(generation, logprobs=[math.nan] * len(generation.logprobs))
    return generation
