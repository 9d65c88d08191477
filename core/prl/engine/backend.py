"""What an engine provides so that `prl.engine.server` can serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from prl.engine.methods import Failure
from prl.messages import GenerateRequest, Generation, Installed, WeightsRef

Key = tuple[object, str]
"""Who asked (a peer of the wire) and the id it gave the request."""


class Result:
    """How one request ended: with a generation or a failure."""

    __slots__ = ("failure", "generation", "key")

    def __init__(self, key: Key, generation: Generation | None, failure: Failure | None) -> None:
        self.key = key
        self.generation = generation
        self.failure = failure


Deliver = Callable[[list[Result]], None]
"""Called with everything that one step finished, from any thread."""


class Backend(Protocol):
    """An engine without its wire. Every method is called on the event loop and none of them may block it."""

    @property
    def version(self) -> int:
        """Installed and verified."""
        ...

    @property
    def incarnation(self) -> int: ...

    def start(self, deliver: Deliver) -> None:
        """Called once, before anything else."""
        ...

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None: ...

    def abort(self, keys: Iterable[Key]) -> None:
        """Forget these requests: nothing is delivered for them. Unknown ones are ignored."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]: ...

    async def pause(self) -> None:
        """Stop between two tokens. Never called while paused."""
        ...

    async def resume(self) -> None:
        """Go on. Only called while paused."""
        ...

    async def install(self, weights: WeightsRef) -> Installed:
        """As `EngineClient.install`; one at a time, paused or not."""
        ...

    @property
    def load(self) -> int:
        """Running plus waiting requests."""
        ...

    @property
    def busy(self) -> float:
        """Seconds of computing so far."""
        ...

    def info(self) -> dict[str, Any]:
        """For `EngineHealth.info`. While weights are being installed `installing` is a phrase that says how far that
        is: it goes into heartbeats, for whoever asks why nothing moves."""
        ...

    def gauges(self) -> dict[str, float]:
        """What its heartbeats report besides `version`, `load` and `tokens`, of these names as far as they are known:
        `kv_usage` (0 to 1), `running` and `waiting` requests, `preemptions` (so far), `capacity` (tokens that the
        cache holds, or requests that are computed at once where it has no cache of tokens). `tokens` counts the
        sampled ones so far and must be there."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SleepingBackend(Backend, Protocol):
    """Of an engine whose schema says `can_sleep`."""

    async def sleep(self) -> None:
        """Stop, and free the memory of the GPU. Requests stay. Never called while asleep."""
        ...

    async def wake(self) -> None:
        """Undo it: the same weights, empty caches. Only called while asleep."""
        ...
