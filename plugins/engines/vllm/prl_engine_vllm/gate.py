"""What installing weights needs of generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Gate(Protocol):
    """Every method runs on the engine's event loop.

    A swap of weights is::

        await gate.pause()
        ... apply the new weights ...
        gate.hold()
        await gate.resume(version, incarnation)
        if ... await gate.score(probes) ... agree:
            gate.release()
        else:
            await gate.fail_in_flight("...")
            await gate.pause()
            ... apply the former weights ...
            await gate.resume(former_version, former_incarnation)
            gate.release()

    New adapters change nothing for requests in flight: `serve_adapter`, with no pause.
    """

    async def pause(self) -> None:
        """Stop between two tokens and count what every request has: those tokens are of the version so far. Requests
        stay. Idempotent; a pause that somebody else asked for outlives `resume`."""
        ...

    async def resume(self, version: int, incarnation: int) -> None:
        """Go on. Tokens from now on are of `version`. Keys and values of requests in flight are rebuilt or kept, as
        `swap_kv` says, and prefix caches of other versions no longer serve."""
        ...

    def hold(self) -> None:
        """From now on nothing that is generated leaves this process."""
        ...

    def release(self) -> None:
        """Deliver what was held back."""
        ...

    async def fail_in_flight(self, reason: str) -> None:
        """Abort every request in flight, and drop what was held back: all fail as retryable."""
        ...

    async def score(
        self, sequences: Sequence[Sequence[int]], *, rank: int | None = None, lora: Any = None
    ) -> list[list[float]]:
        """Log-probabilities (f32[T], the first 0) at temperature 1 under the weights in place, also while results are
        held back. Ahead of everything that waits.

        Args:
            rank: the data-parallel rank that computes it; None for any.
            lora: a vLLM `LoRARequest` to score through.
        """
        ...

    def serve_adapter(self, version: int, incarnation: int, lora: Any) -> None:
        """Requests that start from now on are of `version` and go through this vLLM `LoRARequest`, None for none.
        Those in flight end under theirs."""
        ...

    def adapters_in_use(self) -> set[int]:
        """The `lora_int_id` of every adapter that new requests go through or a request in flight has."""
        ...
