"""Which engine answers a turn, and what happens when it does not.

A conversation stays with the engine that holds its prefix unless that one is clearly busier than another; a new one
goes to the idlest, and of several to the one that was chosen longest ago. A lost engine is passed over for a moment
that doubles with every failure, and is connected to again; a turn is tried again until its deadline, because an engine
that comes back is announced by the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from prl.errors import EpisodeFailed, WireError
from prl.messages import EngineAddress, GenerateRequest, Generation
from prl.protocols import EngineClient

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
AFFINITY_SLACK = 16
"""Requests by which a conversation's own engine may be busier than the idlest one."""

Connect = Callable[[str], EngineClient]


class Line:
    """One connection to an engine, and how many turns are waited for over it."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.load = 0


class Engine:
    """One engine as the router sees it. `serving` engines take new turns; others only finish what they have. `picked`
    says when it was last chosen, by a count."""

    def __init__(self, address: EngineAddress, line: Line) -> None:
        self.replica = address.replica
        self.address = address.address
        self.line = line
        self.load = 0
        self.picked = 0
        self.serving = True
        self.failures = 0
        self.usable_at = 0.0


class HasEngine(Protocol):
    """A conversation: it remembers its engine."""

    engine: Any


class Router:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._engines: dict[str, Engine] = {}
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._picks = itertools.count(1)
        self.retries = 0

    @property
    def in_flight(self) -> int:
        return sum(engine.load for engine in self._engines.values())

    @property
    def serving(self) -> int:
        return sum(engine.serving for engine in self._engines.values())

    def set(self, addresses: list[EngineAddress]) -> None:
        """The engines that serve from now on. One that is no longer named finishes what it has, then is let go."""
        named = {address.address for address in addresses}
        for engine in list(self._engines.values()):
            if engine.address not in named:
                engine.serving = False
                self._let_go(engine)
        for address in addresses:
            known = self._engines.get(address.address)
            if known is None:
                self._engines[address.address] = Engine(address, Line(self._connect(address.address)))
                continue
            known.serving = True
            if known.failures:
                self._connect_again(known)
                known.failures, known.usable_at = 0, 0.0
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, owner: HasEngine, request: GenerateRequest) -> Generation:
        """Have a turn sampled. The caller limits the time.

        Raises:
            EpisodeFailed: the engine says that this request cannot be answered.
        """
        while True:
            engine = self._pick(owner.engine)
            if engine is None:
                await self._wait()
                continue
            owner.engine = engine
            engine.picked = next(self._picks)
            line = engine.line
            engine.load += 1
            line.load += 1
            try:
                generation = await line.client.generate(request)
                if line is engine.line:
                    engine.failures = 0
                return generation
            except WireError as error:
                if line is engine.line:
                    self._failed(engine, error)
                self.retries += 1
            finally:
                engine.load -= 1
                line.load -= 1
                if not engine.serving:
                    self._let_go(engine)
                if line is not engine.line and not line.load:
                    self._close(line)

    def _pick(self, own: Engine | None) -> Engine | None:
        now = asyncio.get_running_loop().time()
        best: Engine | None = None
        for engine in self._engines.values():
            if not engine.serving or engine.usable_at > now:
                continue
            if best is None or (engine.load, engine.picked) < (best.load, best.picked):
                best = engine
        if own is not None and best is not None and own.serving and own.usable_at <= now:
            return own if own.load <= best.load + AFFINITY_SLACK else best
        return best

    async def _wait(self) -> None:
        """Until the engines change, or one may be tried again."""
        loop = asyncio.get_running_loop()
        times = [engine.usable_at for engine in self._engines.values() if engine.serving]
        timeout = max(0.001, min(times) - loop.time()) if times else None
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await changed.wait()

    def _failed(self, engine: Engine, error: WireError) -> None:
        now = asyncio.get_running_loop().time()
        if engine.usable_at <= now:  # many requests fail with one engine: count that once
            if not engine.failures:
                log.warning("engine %d at %s: %s; its turns are tried again", engine.replica, engine.address, error)
            else:
                self._connect_again(engine)  # twice in a row: it may be the connection that is cut
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**engine.failures)
            engine.failures += 1
            engine.usable_at = now + pause

    def _connect_again(self, engine: Engine) -> None:
        """New turns get a new connection; turns that wait over the former one are not disturbed."""
        former, engine.line = engine.line, Line(self._connect(engine.address))
        if not former.load:
            self._close(former)

    def _let_go(self, engine: Engine) -> None:
        if engine.load or self._engines.get(engine.address) is not engine:
            return
        del self._engines[engine.address]
        self._close(engine.line)

    def _close(self, line: Line) -> None:
        task = asyncio.get_running_loop().create_task(line.client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for engine in list(self._engines.values()):
            await engine.line.client.close()
        self._engines.clear()


def check(generation: Generation) -> None:
    """What an engine returned must be usable for training.

    Raises:
        EpisodeFailed: lengths differ, a log-probability is missing, positive or not a number, or there are no tokens.
    """
    count = len(generation.token_ids)
    logprobs = generation.logprobs
    if generation.stop_reason == "aborted":
        raise EpisodeFailed("aborted", "the engine aborted this turn", retryable=True)
    if not count:
        raise EpisodeFailed("no_tokens", "the engine returned a turn without a single token")
    if logprobs is None or len(logprobs) != count or len(generation.versions) != count:
        raise EpisodeFailed(
            "bad_logprobs",
            f"the engine returned {count} tokens, {len(logprobs or ())} log-probabilities and "
            f"{len(generation.versions)} versions",
        )
    for index, value in enumerate(logprobs):
        # The comparison is false for NaN; rounding may leave a certain token slightly above 0.
        if not isinstance(value, float) or not float("-inf") < value <= 1e-4:
            raise EpisodeFailed("bad_logprobs", f"the engine returned {value!r} as log-probability of token {index}")
