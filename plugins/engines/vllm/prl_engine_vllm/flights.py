"""Requests in flight: what each has so far, and which version of the weights made which of its tokens."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from prl.engine.backend import Key
from prl.engine.methods import Failure
from prl.messages import GenerateRequest, Generation

STOP, LENGTH = 0, 1
"""vLLM's `FinishReason`, an IntEnum in every version; what is neither ended without an answer."""
SPARE_SEATS = 2
"""Of the requests that one engine core computes at once: kept for probes, which must not wait for long answers."""


class Flight:
    """One request. `marks` are (index of a token, version): that token and those after it are of that version."""

    __slots__ = ("adapter", "id", "key", "logprobs", "marks", "rank", "recomputed", "request", "stats", "tokens")

    def __init__(self, id: str, key: Key, request: GenerateRequest) -> None:
        self.id = id
        self.key = key
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.marks: list[tuple[int, int]] = []
        self.adapter: int | None = None
        self.rank = 0
        """The data-parallel rank that computes it."""
        self.stats: Any = None
        """vLLM's `RequestStateStats`, where it counts."""
        self.recomputed = False
        """Its keys and values were thrown away at a swap, which vLLM reports as a preemption."""

    def mark(self, version: int) -> None:
        """Tokens from now on are of `version`."""
        count = len(self.tokens)
        if self.marks and self.marks[-1][0] == count:
            self.marks.pop()
        if not self.marks or self.marks[-1][1] != version:
            self.marks.append((count, version))

    def versions(self) -> list[int]:
        found: list[int] = []
        ends = [start for start, _ in self.marks[1:]] + [len(self.tokens)]
        for (start, version), end in zip(self.marks, ends):
            found.extend([version] * (end - start))
        return found

    def result(self, finish: int) -> Generation | Failure:
        """How it ended, after vLLM's `FinishReason`."""
        if finish not in (STOP, LENGTH):
            return Failure("", f"vLLM ended the request with reason {finish}", retryable=True)
        if len(self.logprobs) != len(self.tokens):
            return Failure("", f"{len(self.tokens)} tokens came with {len(self.logprobs)} log-probabilities")
        if not math.isfinite(math.fsum(self.logprobs)):
            return Failure("engine_nan", f"log-probabilities that are not numbers, under version {self.marks[-1][1]}")
        return Generation(self.tokens, self.logprobs, self.versions(), "stop" if finish == STOP else "length")


class Scoring:
    """A sequence to be scored: vLLM gives the log-probabilities of its prompt. It is not part of the load."""

    __slots__ = ("future", "id", "logprobs")

    def __init__(self, id: str) -> None:
        self.id = id
        self.logprobs: list[float] = [0.0]
        self.future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def take(self, output: Any) -> bool:
        """Add what a vLLM `EngineCoreOutput` brings. True when this was the last."""
        scored = output.new_prompt_logprobs_tensors
        if scored is not None:  # [T - 1, 1 or more]: the token itself stands first
            self.logprobs += scored.logprobs[:, 0].tolist()
        return output.finish_reason is not None


class Seats:
    """How many requests of ours each data-parallel rank computes at once. vLLM would spread them by counts that are up
    to 0.1 s old, and fill the seats that are kept on one."""

    def __init__(self, llm: Any) -> None:
        config = llm.vllm_config
        self._each = max(1, config.scheduler_config.max_num_seqs - SPARE_SEATS)
        self._taken = [0] * max(1, config.parallel_config.data_parallel_size)

    def free(self) -> int | None:
        """The rank with the fewest; None where all are taken."""
        fewest = min(self._taken)
        return self._taken.index(fewest) if fewest < self._each else None

    def take(self, rank: int) -> None:
        self._taken[rank] += 1

    def give_back(self, rank: int) -> None:
        self._taken[rank] -= 1

    def named(self, rank: int) -> int | None:
        """As vLLM wants it: one rank has no number."""
        return rank if len(self._taken) > 1 else None
