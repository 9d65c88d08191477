"""The engine behind `prl.engine`: a scheduler that computes tokens, and weights that are installed between two of them.

Tokens are computed in the scheduler's thread, weights are read in another; the event loop only hands things over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from prl import faults
from prl.engine.backend import Deliver, Key
from prl.engine.probes import check
from prl.errors import PrlError, WeightsError
from prl.messages import GenerateRequest, Installed, WeightsRef
from prl.protocols import ChannelReceiver, ReceivedWeights
from prl_engine_embedded.model import LoadedModel
from prl_engine_embedded.scheduler import Scheduler
from prl_engine_embedded.weights import Swap

log = logging.getLogger(__name__)


class EmbeddedBackend:
    """A `prl.engine.backend.Backend`, and the state that survives a request: which version is installed."""

    def __init__(
        self, model: LoadedModel, scheduler: Scheduler, receiver: ChannelReceiver | None, *, recompute: bool = True
    ) -> None:
        self.version = 0
        self.incarnation = 0
        self.model = model
        self.scheduler = scheduler
        self._receiver = receiver
        self._recompute = recompute
        self._paused = ExitStack()

    def start(self, deliver: Deliver) -> None:
        self.scheduler.start(deliver)

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None:
        self.scheduler.add(requests)

    def abort(self, keys: Iterable[Key]) -> None:
        self.scheduler.abort(keys)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        def score() -> list[list[float]]:
            with self.scheduler.hold():
                return self.model.score(sequences)

        return await asyncio.to_thread(score)

    async def pause(self) -> None:
        await asyncio.to_thread(self._paused.enter_context, self.scheduler.hold())

    async def resume(self) -> None:
        self._paused.close()

    @property
    def load(self) -> int:
        return self.scheduler.load

    @property
    def busy(self) -> float:
        return self.scheduler.busy

    def info(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {"tokens": scheduler.tokens, "batching": type(scheduler).__name__.removesuffix("Scheduler").lower()}

    def gauges(self) -> dict[str, float]:
        scheduler = self.scheduler
        load, capacity = scheduler.load, scheduler.capacity
        running = min(load, capacity)
        return {
            "tokens": float(scheduler.tokens),
            "running": float(running),
            "waiting": float(load - running),
            "capacity": float(capacity),
        }

    def close(self) -> None:
        self._paused.close()
        self.scheduler.close()

    # --- weights --------------------------------------------------------------------------------------------

    async def install(self, weights: WeightsRef) -> Installed:
        """Read a version while generation goes on, then stop between two tokens, swap, verify, go on."""
        if self._receiver is None:
            raise WeightsError("this engine was started without a weight channel")
        faults.point("engine.announced")
        received = await asyncio.to_thread(self._receive, self._receiver, weights)
        found = await asyncio.to_thread(self._swap, weights, received)
        faults.point("engine.acknowledged")
        return found

    def _receive(self, receiver: ChannelReceiver, weights: WeightsRef) -> ReceivedWeights:
        try:
            faults.point("engine.transferring")
            return receiver.receive(weights)
        except PrlError:
            raise
        except Exception as error:
            raise WeightsError(f"version {weights.version} cannot be read: {type(error).__name__}: {error}") from error

    def _swap(self, weights: WeightsRef, received: ReceivedWeights) -> Installed:
        with self.scheduler.hold(), self.model.lock, self._alone_on_the_device():
            swap = Swap(self.model.module)
            tensors = swap.fitted(received.tensors)
            try:
                swap.apply(tensors)
                faults.point("engine.install")
                found = self._compared(received)
                faults.point("engine.verified")
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
        log.info(
            "version %d installed, probes differ by %.2g, KL %.2g over %d tokens",
            weights.version, found.probe_difference, found.probe_kl, found.probe_tokens,
        )  # fmt: skip
        return found

    def _compared(self, received: ReceivedWeights) -> Installed:
        """Raises WeightsError where the probes do not agree."""
        if not received.probes:
            return Installed()
        scored = self.model.score([probe.token_ids for probe in received.probes])
        return check(received.probes, scored, received.tolerance)

    @contextmanager
    def _alone_on_the_device(self) -> Iterator[None]:
        """On a GPU, wait for every stream before and after: what is copied here may be the trainer's memory, which it
        takes back once this version is acknowledged."""
        import torch

        cuda = self.model.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.model.device)
        yield
        if cuda:
            torch.cuda.synchronize(self.model.device)
