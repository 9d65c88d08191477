"""An event loop on virtual time: thousands of hours of schedules in seconds, each the same every time.

Production code sleeps with `asyncio.sleep` and reads `loop.time()`; on this loop, when nothing is ready, time jumps
to the next timer. A loop with nothing ready and no timer would wait for ever: that is `Deadlock`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Nothing can ever happen again, yet something is awaited."""


class _VirtualSelector(selectors.SelectSelector):
    """Never sleeps: it moves its loop's clock forward instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise Deadlock("no task can run and no timer is set")
        self.loop.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A selector loop whose `time()` starts at 0 and advances only when nothing is ready."""

    def __init__(self) -> None:
        selector = _VirtualSelector()
        super().__init__(selector)
        selector.loop = self
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        # At least a nanosecond: a timer closer than the clock's resolution must still come due.
        self._now += max(seconds, 1e-9)


def run(main: Coroutine[Any, Any, T], *, limit_s: float = 1e7) -> T:
    """Run `main` on virtual time.

    Raises:
        Deadlock: nothing could ever happen again. TimeoutError: virtual time passed `limit_s`.
    """

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(bounded())
