"""Our requests in vLLM's own statistics: /metrics counts them as it counts those that come over HTTP.

vLLM's output processor makes them beside an object for every token. Here they are made for every step and request. What
vLLM counts of single tokens, the times between two of them (`vllm:inter_token_latency_seconds`), has requests over HTTP
alone; a request's mean time per token is there. Probes do not count.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prl_engine_vllm.flights import Flight

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class Metrics:
    """Nothing happens where vLLM was told to count nothing (`disable_log_stats`)."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._on = bool(llm.log_stats) and llm.logger_manager is not None
        self._step: Any = None

    def arrived(self, flight: Flight) -> None:
        if self._on:
            from vllm.v1.metrics.stats import RequestStateStats

            flight.stats = RequestStateStats(arrival_time=time.time())

    def first(self, flight: Flight, output: Any, at: float) -> None:
        """The first token of a request; `at` is the engine core's time of the step."""
        if self._on:
            states: Any = self._llm.output_processor.lora_states
            self._stats().update_from_output(output, at, True, flight.stats, states, None)

    def events(self, flight: Flight, output: Any) -> None:
        """What befell it later: preemptions."""
        if self._on:
            states: Any = self._llm.output_processor.lora_states
            self._stats().update_from_events(output.request_id, output.events, False, flight.stats, states, None)

    def finished(self, flight: Flight, reason: Any, at: float) -> None:
        if not self._on:
            return
        count = len(flight.tokens)
        flight.stats.num_generation_tokens, flight.stats.last_token_ts = count, at
        step, request = self._stats(), flight.request
        step.update_from_finished_request(
            reason, flight.id, len(request.token_ids), request.sampling.max_tokens, flight.stats
        )
        step.n_params_iter.append(1)
        step.max_num_generation_tokens_iter.append(count)

    def record(self, rank: int, tokens: int) -> None:
        """The step of this data-parallel rank is booked; our requests got so many tokens in it."""
        if self._on and (tokens or self._step is not None):
            step, self._step = self._stats(), None
            step.num_generation_tokens = tokens
            manager: Any = self._llm.logger_manager  # another one after a change of scale
            manager.record(engine_idx=rank, scheduler_stats=None, iteration_stats=step)

    def _stats(self) -> Any:
        if self._step is None:
            from vllm.v1.metrics.stats import IterationStats

            self._step = IterationStats()
        return self._step
