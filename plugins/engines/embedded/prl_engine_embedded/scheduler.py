"""What the server needs of a scheduler, and the request it hands to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from prl.messages import GenerateRequest, Generation
from prl_engine_embedded.methods import Failure

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
"""Called from the scheduler's own thread, once per step, with everything that step finished."""


class Scheduler(Protocol):
    """Turns requests into tokens in a thread of its own. Every method may be called from any thread."""

    version: int
    """Stamped on every token sampled from now on. Change it only inside `hold()`."""
    busy: float
    """Seconds of computing so far."""
    tokens: int
    """Tokens sampled so far."""

    def start(self, deliver: Deliver) -> None: ...

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None: ...

    def abort(self, keys: Iterable[Key]) -> None: ...

    def hold(self) -> AbstractContextManager[None]:
        """Stop between two tokens while the block runs; requests stay. Blocks until the step in progress is done."""
        ...

    def weights_changed(self, recompute: bool) -> None:
        """Inside `hold()`, after the weights changed: rebuild what was computed with the old ones, or keep it."""
        ...

    @property
    def load(self) -> int:
        """Running plus waiting requests."""
        ...

    def close(self) -> None: ...
