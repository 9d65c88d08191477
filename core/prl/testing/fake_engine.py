"""A fake engine: a bigram model in numpy behind the `EngineClient` protocol, on virtual time or real.

Its logits are random numbers drawn from (version, previous token), so that log-probabilities change with every install
and can be recomputed by a test: `FakeEngine.logprobs`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prl.errors import WeightsError
from prl.messages import EngineHealth, GenerateRequest, Generation, Installed, WeightsRef


class FakeEngine:
    """Args:
    vocabulary: number of tokens. end: the token that ends an answer, or -1 for none.
    token_s: seconds that one token takes.
    """

    def __init__(self, *, vocabulary: int = 16, end: int = -1, token_s: float = 0.0) -> None:
        self.version = 0
        self.incarnation = 0
        self.installed: list[int] = []
        self.load = 0
        self.busy = 0.0
        self._vocabulary = vocabulary
        self._end = end
        self._token_s = token_s
        self.probed = Installed()
        """What it answers to an install."""
        self.asleep = False
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        sampling = request.sampling
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        stops = {*request.stop_token_ids, self._end}
        self.load += 1
        try:
            while len(tokens) < sampling.max_tokens:
                await asyncio.sleep(self._token_s)
                await self._running.wait()
                previous = tokens[-1] if tokens else request.token_ids[-1]
                at = self.logprobs(previous, sampling.temperature or 1.0)
                if sampling.temperature == 0:
                    token = int(at.argmax())
                else:
                    draw = np.random.default_rng([request.seed, len(tokens)]).random()
                    token = min(int(np.searchsorted(np.exp(at).cumsum(), draw)), self._vocabulary - 1)
                tokens.append(token)
                logprobs.append(float(at[token]))
                versions.append(self.version)
                self.busy += self._token_s
                if token in stops:
                    return Generation(tokens, logprobs, versions, "stop")
            return Generation(tokens, logprobs, versions, "length")
        finally:
            self.load -= 1

    def logprobs(self, previous: int, temperature: float = 1.0) -> NDArray[np.float64]:
        """f64[vocabulary]: of the next token, under the version installed now."""
        return _logprobs(self._vocabulary, self.version, self.incarnation, previous, temperature)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [
            [0.0, *(float(self.logprobs(before)[token]) for before, token in zip(tokens[:-1], tokens[1:], strict=True))]
            for tokens in sequences
        ]

    async def pause(self) -> None:
        self._running.clear()

    async def install(self, weights: WeightsRef) -> Installed:
        """Takes any reference whose location starts with "fake:", as `FakeTrainer` makes them.

        Raises:
            WeightsError: another location.
        """
        assert not self.asleep, "weights for an engine that sleeps"
        if not weights.location.startswith("fake:"):
            raise WeightsError(f"{weights.location}: a fake engine installs what a fake trainer published")
        self.version, self.incarnation = weights.version, weights.incarnation
        self.installed.append(weights.version)
        return self.probed

    async def resume(self) -> None:
        self._running.set()

    async def sleep(self) -> None:
        self.asleep = True
        self._running.clear()

    async def wake(self) -> None:
        self.asleep = False
        self._running.set()

    async def health(self) -> EngineHealth:
        return EngineHealth(self.version, self.incarnation, not self._running.is_set(), self.load, self.busy)

    async def close(self) -> None:
        self._running.set()


@functools.lru_cache(4096)
def _logprobs(
    vocabulary: int, version: int, incarnation: int, previous: int, temperature: float
) -> NDArray[np.float64]:
    logits = 2.0 * np.random.default_rng([version, incarnation, previous]).standard_normal(vocabulary) / temperature
    result: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return result
