"""The thread of a scheduler that computes step by step: what arrives between two steps, and stopping between two."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from prl.engine.backend import Deliver, Key, Result
from prl.messages import GenerateRequest

log = logging.getLogger(__name__)


class SteppedScheduler(ABC):
    """The part of `Scheduler` that has to do with threads. A subclass computes in `step`, which is called in one thread
    only, and appends to `finished` what a step finished."""

    def __init__(self) -> None:
        self.version = 0
        self.busy = 0.0
        self.tokens = 0
        self.finished: list[Result] = []
        self._arrived: deque[tuple[Key, GenerateRequest]] = deque()
        self._aborted: set[Key] = set()
        self._condition = threading.Condition()
        self._holders = 0
        self._stepping = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._deliver: Deliver = lambda results: None

    @abstractmethod
    def step(self, arrived: Iterable[tuple[Key, GenerateRequest]], aborted: set[Key]) -> None:
        """Take requests in, drop aborted ones, and sample one token of every request that runs."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step has anything to do besides what arrives."""

    @abstractmethod
    def fail_everything(self, why: str) -> None:
        """A step raised: end every request with a failure that may be tried again."""

    @property
    def num_arrived(self) -> int:
        """Requests that no step has seen."""
        return len(self._arrived)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._thread.start()

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None:
        with self._condition:
            self._arrived.extend(requests)
            self._condition.notify_all()

    def abort(self, keys: Iterable[Key]) -> None:
        with self._condition:
            self._aborted.update(keys)
            self._condition.notify_all()

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._condition:
            self._holders += 1
            while self._stepping:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._holders -= 1
                self._condition.notify_all()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._stepping = False
                self._condition.notify_all()
                while not self._closed and (self._holders or not self._is_wanted()):
                    self._condition.wait()
                if self._closed:
                    return
                self._stepping = True
                arrived, self._arrived = self._arrived, deque()
                aborted, self._aborted = self._aborted, set()
            began = time.perf_counter()
            try:
                self.step(arrived, aborted)
            except Exception as error:
                log.exception("a decode step failed")
                self.fail_everything(f"a decode step failed: {type(error).__name__}: {error}")
            self.busy += time.perf_counter() - began
            finished, self.finished = self.finished, []
            if finished:
                self._deliver(finished)

    def _is_wanted(self) -> bool:
        return bool(self._arrived or self._aborted or self.finished or self.has_work())
