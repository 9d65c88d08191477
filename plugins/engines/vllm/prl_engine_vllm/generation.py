"""Requests in, tokens out, over vLLM's engine core: the `Gate` that installing weights goes through.

Every output of the engine core passes `_take` in the order in which the engine made it, before anything else of vLLM
sees it. Requests of ours are booked there and only there, as numbers: vLLM's own output processor builds objects for
every token, which cost a fifth of the throughput at 512 requests (25,900 instead of 31,000 tokens/s on an H200). What
belongs to the HTTP interface goes on to it.

Versions: the answer to a pause comes through the same socket after the last token that was sampled before it. So when
`pause` returns every token is booked, and those that follow `resume` are of the new version.

Prefix caches: every request, of the HTTP interface too, gets a salt that names the weights it started under.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prl.engine.backend import Deliver, Key, Result
from prl.engine.methods import Failure
from prl.errors import EpisodeFailed, WireError
from prl.messages import GenerateRequest
from prl_engine_vllm.flights import Flight, Scoring, Seats
from prl_engine_vllm.gauges import Gauges
from prl_engine_vllm.metrics import Metrics
from prl_engine_vllm.outbox import Outbox

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

SCORE_FIRST, GENERATE_AFTER = 0, 1
"""Priorities of vLLM's scheduler; the lower is the sooner."""
SEEDS = 2**63 - 1


class Generation:
    """One per process, made on the event loop it runs on. `on_dead(why)` is called when the engine core has died."""

    def __init__(self, llm: AsyncLLM, tasks: Any, *, recompute: bool, on_dead: Callable[[str], None]) -> None:
        self.version = 0
        self.incarnation = 0
        self.paused = False
        self.gauges = Gauges(llm.vllm_config)
        self._metrics = Metrics(llm)
        self._llm = llm
        self._tasks = tasks
        self._recompute = recompute
        self._on_dead = on_dead
        self._deliver: Deliver = lambda results: None
        self._open: dict[str, Flight | Scoring] = {}
        self._by_key: dict[Key, Flight] = {}
        self._waiting: deque[Flight] = deque()
        self._held: list[Result] | None = None
        self._held_outputs: list[Any] = []
        self._shut = False
        self._lora: Any = None
        self._weights = 0
        self._serial = 0
        self._seats = Seats(llm)
        self._outbox = Outbox(llm, self._open.__contains__, self._died)
        self._max_tokens = llm.model_config.max_model_len
        self._pass_on = llm.engine_core.outputs_queue.put_nowait
        self._send_add = llm.engine_core.add_request_async
        llm.engine_core.outputs_queue.put_nowait = self._take
        llm.engine_core.add_request_async = self._add_salted

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver

    @property
    def load(self) -> int:
        """Requests of ours, running and waiting."""
        return len(self._by_key)

    # --- requests in ----------------------------------------------------------------------------------------

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None:
        refused = []
        for key, request in requests:
            problem = self._problem_with(key, request)
            if problem is not None:
                refused.append(Result(key, None, problem))
                continue
            flight = Flight(self._next_id(), key, request)
            self._metrics.arrived(flight)
            self._by_key[key] = flight
            self._waiting.append(flight)
        self._submit_waiting()
        if refused:
            self._deliver(refused)

    def abort(self, keys: Iterable[Key]) -> None:
        found = [flight for key in keys if (flight := self._by_key.pop(key, None)) is not None]
        self._drop(found)
        if self._held:
            gone = {flight.key for flight in found}
            self._held = [result for result in self._held if result.key not in gone]
        self._submit_waiting()

    def _problem_with(self, key: Key, request: GenerateRequest) -> Failure | None:
        if key in self._by_key:
            return Failure("bad_request", f"a request {request.id!r} is in flight already")
        if not request.token_ids:
            return Failure("bad_request", "an empty prompt: there is nothing to continue")
        if request.sampling.max_tokens < 1:
            return Failure("bad_request", f"max_tokens = {request.sampling.max_tokens}: at least 1 is needed")
        if len(request.token_ids) >= self._max_tokens:
            return Failure(
                "context_full",
                f"the prompt has {len(request.token_ids)} tokens and a sequence may have {self._max_tokens}: shorten "
                "the conversation or raise engine.max_model_len",
            )
        return None

    def _submit_waiting(self) -> None:
        refused = []
        while self._waiting and (rank := self._seats.free()) is not None and not self._shut:
            flight = self._waiting.popleft()
            flight.rank = rank
            if flight.key not in self._by_key:
                continue  # aborted meanwhile
            try:
                core_request = self._core_request(flight)
            except Exception as error:  # vLLM's validation has several classes, not the same in every version
                del self._by_key[flight.key]
                refused.append(Result(flight.key, None, Failure("bad_request", f"vLLM refuses the request: {error}")))
                continue
            self._open[flight.id] = flight
            self._seats.take(rank)
            flight.mark(self.version)
            self._outbox.add(core_request)
        self.gauges.queued = len(self._waiting)
        if refused:
            self._deliver(refused)

    def _core_request(self, flight: Flight) -> Any:
        from vllm.sampling_params import SamplingParams

        request, sampling = flight.request, flight.request.sampling
        flight.adapter = self._lora.lora_int_id if self._lora is not None else None
        parameters = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=True,  # what ends an answer is in stop_token_ids
            seed=request.seed & SEEDS,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        rank = self._seats.named(flight.rank)
        return self._processed(flight.id, request.token_ids, parameters, GENERATE_AFTER, self._lora, rank)

    def _processed(
        self, id: str, token_ids: list[int], parameters: Any, priority: int, lora: Any, rank: int | None = None
    ) -> Any:
        from vllm.inputs.engine import tokens_input

        made = self._llm.input_processor.process_inputs(
            id,
            tokens_input(token_ids),
            parameters,
            supported_tasks=self._tasks,
            lora_request=lora,
            priority=priority,
            data_parallel_rank=rank,
        )
        made.external_req_id = id
        return made

    def _next_id(self) -> str:
        self._serial += 1
        return f"prl-{self._serial}"

    async def _add_salted(self, request: Any) -> None:
        """Every request passes here, those of the HTTP interface too."""
        given = f".{request.cache_salt}" if request.cache_salt else ""
        request.cache_salt = f"{self.version}.{self.incarnation}.{self._weights}{given}"
        if request.lora_request is None and request.request_id not in self._open:
            request.lora_request = self._lora
        await self._send_add(request)

    def _drop(self, flights: Iterable[Flight]) -> None:
        """Forget them, here and in the engine core."""
        ids = []
        for flight in flights:
            if self._open.pop(flight.id, None) is not None:
                self._seats.give_back(flight.rank)
                ids.append(flight.id)
        self._outbox.abort(ids)

    # --- outputs --------------------------------------------------------------------------------------------

    def _take(self, outputs: Any) -> None:
        """In the place of the queue's own `put_nowait`."""
        if isinstance(outputs, Exception):
            self._pass_on(outputs)
            self._died(outputs)
            return
        self.gauges.take(outputs)
        before, at = self.gauges.tokens, outputs.timestamp
        finished: list[Result] = []
        others = [output for output in outputs.outputs if not self._book(output, at, finished)]
        self._metrics.record(outputs.engine_index, self.gauges.tokens - before)
        if finished:
            self._submit_waiting()
            if self._held is not None:
                self._held += finished
            else:
                self._settle(finished)
                self._deliver(finished)
        if others or outputs.scheduler_stats is not None:
            outputs.outputs = others
            if self._held is not None and others:
                self._held_outputs.append(outputs)
            else:
                self._pass_on(outputs)

    def _book(self, output: Any, at: float, finished: list[Result]) -> bool:
        """Whether this output of one request and step was ours."""
        flight = self._open.get(output.request_id)
        if flight is None:
            # What we aborted may still send a token. The HTTP interface's requests have other names.
            return bool(output.request_id.startswith("prl-"))
        if isinstance(flight, Scoring):
            if flight.take(output):
                del self._open[flight.id]
                if not flight.future.done():
                    flight.future.set_result(flight.logprobs)
            return True
        new = output.new_token_ids
        if new:
            if not flight.tokens:
                self._metrics.first(flight, output, at)
            elif output.events:
                self._metrics.events(flight, output)
            flight.tokens += new
            scored = output.new_logprobs
            if scored is not None:  # [tokens, 1 or more]: the sampled token stands first
                flight.logprobs += scored.logprobs[:, 0].tolist()
            self.gauges.tokens += len(new)
        if output.events:
            self.gauges.count_preemptions(output.events, flight)
        if output.finish_reason is not None:
            del self._open[flight.id]
            self._seats.give_back(flight.rank)
            self._metrics.finished(flight, output.finish_reason, at)
            ended = flight.result(int(output.finish_reason))
            failed = isinstance(ended, Failure)
            finished.append(Result(flight.key, None if failed else ended, ended if failed else None))  # type: ignore[arg-type]
        return True

    def _settle(self, results: Iterable[Result]) -> None:
        """These are no longer in flight."""
        for result in results:
            self._by_key.pop(result.key, None)
        if not self._by_key:
            self.gauges.idle()

    def _died(self, error: Exception) -> None:
        """Nothing in flight will end. The process ends too, so this is for those who wait in it."""
        why = f"vLLM's engine core has died: {type(error).__name__}: {error}"
        for waiting in self._open.values():
            if isinstance(waiting, Scoring) and not waiting.future.done():
                waiting.future.set_exception(WireError(why))
        self._on_dead(why)

    # --- scoring --------------------------------------------------------------------------------------------

    async def score(
        self, sequences: Sequence[Sequence[int]], *, rank: int | None = None, lora: Any = None
    ) -> list[list[float]]:
        """See `Gate`; without `lora`, through the adapter that new requests go through."""
        from vllm.sampling_params import SamplingParams

        lora = lora if lora is not None else self._lora
        open_: list[Scoring] = []
        for sequence in sequences:
            scoring = Scoring(self._next_id())
            open_.append(scoring)
            if len(sequence) < 2:
                scoring.future.set_result([0.0] * len(sequence))
                continue
            parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
            try:
                made = self._processed(scoring.id, list(sequence), parameters, SCORE_FIRST, lora, rank)
            except Exception as error:
                raise EpisodeFailed("bad_request", f"vLLM refuses to score: {error}") from error
            self._open[scoring.id] = scoring
            self._outbox.add(made)
        try:
            found = await asyncio.gather(*(scoring.future for scoring in open_))
        finally:
            self._outbox.abort([one.id for one in open_ if self._open.pop(one.id, None) is not None])
        for sequence, logprobs in zip(sequences, found, strict=True):
            if len(logprobs) != len(sequence):
                raise WireError(f"vLLM scored {len(logprobs)} of {len(sequence)} tokens")
        return found

    # --- the gate -------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """See `Gate`."""
        await self._llm.engine_core.pause_scheduler_async("keep", False)
        self.paused = True

    async def resume(self, version: int, incarnation: int) -> None:
        """See `Gate`."""
        if (version, incarnation) != (self.version, self.incarnation):
            await self._swapped(version, incarnation)
        await self.go_on()

    async def _swapped(self, version: int, incarnation: int) -> None:
        if self._recompute:
            await self._llm.engine_core.reset_prefix_cache_async(True)
        self._weights += 1
        self.version, self.incarnation = version, incarnation
        for flight in self._open.values():
            if isinstance(flight, Flight):
                flight.mark(version)
                flight.recomputed = self._recompute and bool(flight.tokens)

    async def go_on(self) -> None:
        """Undo a pause; the weights are those from before it."""
        await self._llm.engine_core.resume_scheduler_async()
        self.paused = False
        self.gauges.moved = time.monotonic()

    async def sleep(self) -> None:
        """Free the GPU's memory: the weights move to the host, keys and values are gone. Requests in flight stay, and
        compute theirs again after `wake`."""
        await self.pause()
        await self._llm.engine_core.reset_prefix_cache_async(True)
        await self._llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        """Undo it, and go on with the weights from before."""
        await self._llm.wake_up()
        self._weights += 1
        await self.go_on()

    def hold(self) -> None:
        """See `Gate`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """See `Gate`."""
        held, self._held = self._held, None
        outputs, self._held_outputs = self._held_outputs, []
        if held:
            self._settle(held)
            self._deliver(held)
        for one in outputs:
            self._pass_on(one)
        self._shut = False
        self._submit_waiting()

    async def fail_in_flight(self, reason: str) -> None:
        """See `Gate`. Those that the engine core has not seen yet are left alone, and start after `release`:
        the weights in place are nobody's."""
        self._shut = self._held is not None
        waiting = {flight.key for flight in self._waiting}
        failed = [flight for key, flight in self._by_key.items() if key not in waiting]
        self._drop(failed)
        results = [Result(flight.key, None, Failure("", reason, retryable=True)) for flight in failed]
        self._settle(results)
        if self._held is not None:
            self._held = []
        self._held_outputs = []
        self._weights += 1  # whatever stands in prefix caches is nobody's
        if results:
            self._deliver(results)
        strangers = list(self._llm.output_processor.request_states)
        if strangers:
            await self._llm.abort(strangers, internal=True)

    def serve_adapter(self, version: int, incarnation: int, lora: Any) -> None:
        """See `Gate`."""
        self._weights += 1
        self.version, self.incarnation, self._lora = version, incarnation, lora

    def adapters_in_use(self) -> set[int]:
        """See `Gate`."""
        found = {
            flight.adapter
            for flight in self._open.values()
            if isinstance(flight, Flight) and flight.adapter is not None
        }
        if self._lora is not None:
            found.add(self._lora.lora_int_id)
        return found
