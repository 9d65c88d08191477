"""What the backend needs of a scheduler, and which requests one can answer at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from prl.engine.backend import Deliver, Key
from prl.engine.methods import Failure
from prl.messages import GenerateRequest


class Scheduler(Protocol):
    """Turns requests into tokens in a thread of its own. Every method may be called from any thread."""

    version: int
    """Stamped on every token sampled from now on. Change it only inside `hold()`."""
    busy: float
    """Seconds of computing so far."""
    tokens: int
    """Tokens sampled so far."""
    capacity: int
    """Requests computed at once at most."""

    def start(self, deliver: Deliver) -> None:
        """`deliver` is called from the scheduler's own thread, once per step."""
        ...

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


def problem_with(request: GenerateRequest, max_tokens: int) -> Failure | None:
    """Why a request cannot be answered by this engine at all; `max_tokens` is the longest sequence."""
    if not request.token_ids:
        return Failure("bad_request", "an empty prompt: there is nothing to continue")
    if len(request.token_ids) >= max_tokens:
        return Failure(
            "context_full",
            f"the prompt has {len(request.token_ids)} tokens and a sequence may have {max_tokens}: shorten the "
            "conversation or raise engine.max_sequence_tokens",
        )
    if request.sampling.top_p != 1.0 or request.sampling.top_k != 0:
        return Failure(
            "bad_request",
            f"top_p = {request.sampling.top_p:g}, top_k = {request.sampling.top_k}: the embedded engine samples from "
            "the whole distribution only (top_p = 1, top_k = 0)",
        )
    if request.sampling.max_tokens < 1:
        return Failure("bad_request", f"max_tokens = {request.sampling.max_tokens}: at least 1 is needed")
    return None
