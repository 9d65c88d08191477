"""Coming steps, prepared while one is trained.

A thread for each worker prepares every n-th step ahead of time and puts it into a queue of its own, which holds
`prefetch` of them; the trainer takes them in turn. With `data.workers = 0` the one thread prepares them itself;
otherwise each asks a process of its own (`worker.py`). A step is a function of its number, so their number changes
nothing but the time.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from prl.errors import ConfigError, RunFailed
from prl_trainer_fsdp.sft.steps import Part
from prl_trainer_fsdp.sft.worker import Answer, Orders, read_message, write_message

DEADLINE_S = 900.0
"""For one step's rows, from when the trainer has nothing else to do."""
POLL_S = 0.2
END_S = 5.0

Prepare = Callable[[int], Part]


class Process:
    """A worker's process. Calling it prepares a step.

    Raises, when called:
        ConfigError: what the worker found wrong. RunFailed: it ended, or made a mistake.
    """

    def __init__(self, orders: Orders) -> None:
        command = [sys.executable, "-m", "prl_trainer_fsdp.sft.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._orders: Orders | None = orders

    def __call__(self, step: int) -> Part:
        assert self.process.stdin is not None and self.process.stdout is not None
        body = None
        try:
            if self._orders is not None:
                write_message(self.process.stdin, msgspec.msgpack.encode(self._orders))
                self._orders = None
            write_message(self.process.stdin, msgspec.msgpack.encode(step))
            body = read_message(self.process.stdout)
        except (OSError, ValueError):  # ValueError: closed by `close`, in the other thread
            pass
        if body is None:
            raise RunFailed(
                f"a worker that prepares data (data.workers) ended with code {self.process.wait()} at step {step}: "
                "killed for want of memory? With fewer workers, or workers = 0, it shows"
            )
        answer = msgspec.msgpack.decode(body, type=Answer)
        if answer.part is not None:
            return answer.part
        if answer.expected:
            raise ConfigError(answer.problems)
        raise RunFailed(f"step {step} could not be prepared: {answer.problems[0]}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # it holds nothing that could be lost
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what was still to be written
                    pass


class Prefetcher:
    """Steps `first` to `last`, in order.

    Args:
        prepare: one for each worker.
        depth: steps that each prepares ahead.
    """

    def __init__(self, prepare: Sequence[Prepare], first: int, last: int, depth: int) -> None:
        self._queues: list[queue.Queue[Part | BaseException]] = [queue.Queue(depth) for _ in prepare]
        self._first = first
        self._stop = threading.Event()
        self._prepare = prepare
        self._threads = [
            threading.Thread(
                target=self._work, args=(number, range(first + number, last + 1, len(prepare))), name=f"data-{number}"
            )
            for number in range(len(prepare))
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def take(self, step: int) -> tuple[Part, float]:
        """A step's part, and the seconds that it was waited for. Steps are taken once, in order.

        Raises:
            ConfigError, RunFailed: it could not be prepared.
        """
        number = (step - self._first) % len(self._queues)
        began = time.perf_counter()
        try:
            found = self._queues[number].get(timeout=DEADLINE_S)
        except queue.Empty:
            raise RunFailed(
                f"the rows of step {step} were not prepared in {DEADLINE_S:.0f} s: is a chat template or a file stuck?"
            ) from None
        if isinstance(found, BaseException):
            raise found
        return found, time.perf_counter() - began

    def close(self) -> None:
        """End threads and processes."""
        self._stop.set()
        for prepare in self._prepare:
            if isinstance(prepare, Process):
                prepare.close()
        for thread in self._threads:
            thread.join(END_S)

    def _work(self, number: int, steps: range) -> None:
        for step in steps:
            try:
                found: Part | BaseException = self._prepare[number](step)
            except BaseException as error:  # the trainer raises it when it comes to this step
                found = error
            if not self._put(number, found) or isinstance(found, BaseException):
                return

    def _put(self, number: int, found: Part | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queues[number].put(found, timeout=POLL_S)
                return True
            except queue.Full:
                pass
        return False
