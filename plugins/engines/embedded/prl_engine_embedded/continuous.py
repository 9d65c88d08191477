"""transformers' continuous batching behind this engine's scheduler protocol: a paged cache, any model it can serve.

One persistent manager does everything: making one costs 0.7 s. It samples from torch's global generator, so a request's
own seed has no effect, and requests that ask for the same prompt differ by chance.

What it does not do by itself is added here. Versions: the tokens of every request are counted while the manager is
paused, so a token belongs to the version that was installed when it was sampled. Recompute: requests in flight are made
anew with what they have so far as their prompt, which prefills it under the new weights. Prefix sharing is off, because
its blocks would outlive a version. Without psutil the manager believes that it has no memory and answers every request
with nothing, logging an error: this distribution depends on psutil, and a failed request says why.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from prl import faults
from prl.engine.backend import Deliver, Key, Result
from prl.engine.methods import Failure
from prl.messages import GenerateRequest, Generation
from prl_engine_embedded.config import EmbeddedConfig
from prl_engine_embedded.model import LoadedModel
from prl_engine_embedded.scheduler import problem_with

log = logging.getLogger(__name__)

CPU_PAGE_TOKENS = 32
CPU_CACHE_TOKENS = 65_536
CPU_BATCH_TOKENS = 4096
GREEDY_TEMPERATURE = 1e-4
"""The manager knows no greedy request among others: this cold, the most likely token has all the probability."""


class Flight:
    """A request that the manager has. `spans` are (tokens before it, version), ascending."""

    __slots__ = ("key", "request", "spans")

    def __init__(self, key: Key, request: GenerateRequest, version: int) -> None:
        self.key = key
        self.request = request
        self.spans = [(0, version)]

    def versions(self, count: int) -> list[int]:
        found: list[int] = []
        ends = [start for start, _ in self.spans[1:]] + [count]
        for (_, version), end in zip(self.spans, ends):
            found.extend([version] * (end - len(found)))
        return found


class ContinuousScheduler:
    """See `Scheduler` and the module."""

    def __init__(self, model: LoadedModel, own: EmbeddedConfig) -> None:
        self.version = 0
        self.busy = 0.0
        self.tokens = 0
        self.capacity = own.slots
        self._model = model
        self._own = own
        self._flights: dict[str, Flight] = {}
        self._names: dict[Key, str] = {}
        self._serial = itertools.count()
        self._lock = threading.RLock()
        self._holding = threading.Lock()
        self._holders = 0
        self._pause: AbstractContextManager[None] | None = None
        self._closed = False
        self._deliver: Deliver = lambda results: None
        self._manager = self._make_manager()
        self._collector = threading.Thread(target=self._collect, name="collector", daemon=True)

    # --- from other threads -------------------------------------------------------------------------------

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._manager.start()
        self._collector.start()

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None:
        refused: list[Result] = []
        with self._lock:
            for key, request in requests:
                problem = problem_with(request, self._model.max_tokens) or self._submit(key, request)
                if problem is not None:
                    refused.append(Result(key, None, problem))
        if refused:
            self._deliver(refused)

    def _submit(self, key: Key, request: GenerateRequest) -> Failure | None:
        name = f"q{next(self._serial)}"
        self._flights[name] = Flight(key, request, self.version)
        self._names[key] = name
        accepted = self._manager.add_request(
            request.token_ids,
            request_id=name,
            max_new_tokens=min(request.sampling.max_tokens, self._model.max_tokens - len(request.token_ids)),
            eos_token_id=list(request.stop_token_ids),
            temperature=float(request.sampling.temperature or GREEDY_TEMPERATURE),
        )
        if accepted is not None:
            return None
        self._forget(name)
        return Failure("", "the engine is starting its scheduler again", retryable=True)

    def abort(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                name = self._names.get(key)
                if name is not None:
                    self._forget(name)
                    self._manager.cancel_request(name)

    @contextmanager
    def hold(self) -> Iterator[None]:
        # One pause for all holders: `prl pause` begins in one thread and ends in another.
        with self._holding:
            if not self._holders:
                self._pause = self._manager.pause()
                self._pause.__enter__()
            self._holders += 1
        try:
            yield
        finally:
            with self._holding:
                self._holders -= 1
                if not self._holders and self._pause is not None:
                    pause, self._pause = self._pause, None
                    pause.__exit__(None, None, None)

    def weights_changed(self, recompute: bool) -> None:
        processor = self._manager.batch_processor
        with self._lock:
            active = dict(processor.scheduler.active_requests) if processor is not None else {}
            waiting = dict(processor.scheduler.waiting_requests) if processor is not None else {}
            for name, flight in self._flights.items():
                state = active.get(name) or waiting.get(name)
                count = _sampled(state) if state is not None else 0
                while flight.spans and flight.spans[-1][0] >= count:
                    flight.spans.pop()
                flight.spans.append((count, self.version))
            if not recompute:
                return
            for name, state in active.items():
                again = state.create_equivalent_initial_request()
                state._status = type(state.status).FINISHED
                processor.scheduler.finish_request(name)
                processor.scheduler.add_waiting_request(again)

    @property
    def load(self) -> int:
        return len(self._flights)

    def close(self) -> None:
        self._closed = True
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=10, hard_stop=True)
        self._manager.output_router.output_queue.put(None)
        if self._collector.is_alive():
            self._collector.join(timeout=10)

    # --- the manager ----------------------------------------------------------------------------------------

    def _make_manager(self) -> Any:
        on_cpu = self._model.device.type == "cpu"
        pages = self._own.cache_tokens or (CPU_CACHE_TOKENS if on_cpu else 0)
        page = CPU_PAGE_TOKENS if on_cpu else 256
        batching = ContinuousBatchingConfig(
            return_logprobs=True,
            per_request_processors=True,
            allow_block_sharing=False,
            # A batch in flight during a pause would be of the old weights and counted after it.
            use_async_batching=False,
            auto_switch_to_flash=False,
            page_size=page,
            num_blocks=max(2, pages // page) if pages else None,
            max_batch_tokens=CPU_BATCH_TOKENS if on_cpu else None,
            max_requests_per_batch=self._own.slots,
        )
        # A temperature other than 1 makes the manager keep a temperature for every request.
        sampling = GenerationConfig(
            do_sample=True, temperature=2.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )
        manager = self._model.module.init_continuous_batching(
            generation_config=sampling, continuous_batching_config=batching
        )
        step = manager._generation_step

        def timed() -> None:
            faults.point("engine.decode")
            began = time.perf_counter()
            step()
            self.busy += time.perf_counter() - began

        manager._generation_step = timed
        return manager

    def _collect(self) -> None:
        """The collector's thread: hand on what the manager finished, in batches; replace a manager that died."""
        while not self._closed:
            results = []
            outputs = self._manager.output_router.output_queue
            output = outputs.get()
            while output is not None:
                results.append(output)
                output = None if outputs.empty() else outputs.get_nowait()
            found = [result for item in results if (result := self._result(item)) is not None]
            if found:
                self._deliver(found)
            if not self._closed and self._manager.background_thread_status.fatal_error is not None:
                self._replace_manager()

    def _result(self, output: Any) -> Result | None:
        with self._lock:
            flight = self._flights.get(output.request_id)
            if flight is None or not output.is_finished():
                return None
            self._forget(output.request_id)
        if output.error is not None:
            return Result(flight.key, None, _failure(output.error))
        tokens, logprobs = output.generated_tokens, output.logprobs
        self.tokens += len(tokens)
        if not flight.request.sampling.temperature:
            try:
                logprobs = self._score_greedy(flight.request.token_ids, tokens)
            except RuntimeError as error:  # the manager died meanwhile
                return Result(flight.key, None, _failure(str(error)))
        stopped = bool(tokens) and tokens[-1] in flight.request.stop_token_ids
        generation = Generation(tokens, logprobs, flight.versions(len(tokens)), "stop" if stopped else "length")
        return Result(flight.key, generation, None)

    def _score_greedy(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Log-probabilities at temperature 1: at the one it was sampled with they are all 0."""
        with self.hold():
            return self._model.score([prompt + tokens])[0][len(prompt) :]

    def _forget(self, name: str) -> None:
        flight = self._flights.pop(name, None)
        if flight is not None:
            self._names.pop(flight.key, None)

    def _replace_manager(self) -> None:
        """Its loop raised, so it has failed what it knew of and takes nothing more."""
        error = self._manager.background_thread_status.fatal_error
        log.error("transformers' scheduler died and is started again: %s", error)
        with self._lock:
            left = [Result(flight.key, None, _failure(str(error))) for flight in self._flights.values()]
            self._flights.clear()
            self._names.clear()
            with self._holding:
                self._manager = self._make_manager()
                self._manager.start()
                if self._holders:
                    self._pause = self._manager.pause()
                    self._pause.__enter__()
        if left:
            self._deliver(left)


def _sampled(state: Any) -> int:
    """Tokens sampled so far, also of a request that was made anew with them as its prompt."""
    before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return before + len(state.generated_tokens)


def _failure(error: str) -> Failure:
    # torch.multinomial refuses a whole batch for one row, and does not say which.
    if "inf" in error and "nan" in error:
        return Failure("engine_nan", f"logits that are not numbers, in this request or one beside it: {error}", True)
    return Failure("", f"transformers' scheduler failed: {error}", True)
