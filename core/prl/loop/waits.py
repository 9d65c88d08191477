"""Every wait has an owner, a reason and, where there is one, a deadline. `prl why-stuck RUN` prints them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import msgspec

from prl.errors import RunFailed, WireError

T = TypeVar("T")


class Wait(msgspec.Struct, frozen=True):
    """`waiter` waits for `owner`, because of `reason`, since `since` (loop time, seconds), at most until `deadline`."""

    waiter: str
    owner: str
    reason: str
    since: float
    deadline: float | None = None


class Waits:
    """The waits in progress."""

    def __init__(self) -> None:
        self._active: dict[str, Wait] = {}

    @contextlib.contextmanager
    def on(self, waiter: str, owner: str, reason: str, timeout: float | None = None) -> Iterator[None]:
        """Register a wait for the duration of a block. One waiter waits for one thing at a time."""
        now = asyncio.get_running_loop().time()
        self._active[waiter] = Wait(waiter, owner, reason, now, None if timeout is None else now + timeout)
        try:
            yield
        finally:
            self._active.pop(waiter, None)

    def current(self) -> list[Wait]:
        return sorted(self._active.values(), key=lambda wait: wait.since)

    def of(self, waiter: str) -> Wait | None:
        return self._active.get(waiter)

    def describe(self) -> list[str]:
        """One line per wait, the oldest first."""
        now = asyncio.get_running_loop().time()
        lines = []
        for wait in self.current():
            limit = "" if wait.deadline is None else f", at most {max(0.0, wait.deadline - now):.0f} s more"
            lines.append(f"{wait.waiter} waits for {wait.owner}: {wait.reason} (for {now - wait.since:.1f} s{limit})")
        return lines


async def within(call: Awaitable[T], timeout: float, what: str, role: str) -> T:
    """Wait for a role, but not for ever.

    Raises:
        RunFailed: it is gone, failed, or took longer than `timeout` (loop.step_timeout_s) seconds.
    """
    log = f"logs/{role}-0.log"
    try:
        async with asyncio.timeout(timeout):
            return await call
    except TimeoutError:
        raise RunFailed(f"{what} took longer than loop.step_timeout_s = {timeout:g} s", log=log) from None
    except WireError as error:
        raise RunFailed(f"{what}: {error}", log=log) from error


class Signal:
    """Wakes everyone who waits for a change of the shared state; each then looks again for itself."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
