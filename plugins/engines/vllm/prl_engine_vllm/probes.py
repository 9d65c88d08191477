"""Scoring sequences through the engine as it serves, and comparing them with what the trainer says.

A sequence is scored as an ordinary request (its prompt's log-probabilities, one token made), before every other in the
queue. So what is checked is what generates: the same batches, kernels, shards and quantisation.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prl.errors import WeightsError
from prl.protocols import Probe

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

FIRST = -(10**9)
"""Priority, where lower comes first; requests have 0."""
QUANTISED_FACTOR, QUANTISED_LEAST = 2.0, 0.3
"""What the tolerance of the trainer becomes where the engine quantises: so many times it, and at least so much. An
eight-bit engine is farther from the trainer than 16 bits are (0.15), and not all of it is the weights' fault."""

_numbers = itertools.count()


async def score(
    llm: AsyncLLM,
    sequences: Sequence[Sequence[int]],
    *,
    rank: int | None = None,
    adapter: LoRARequest | None = None,
    priority: int = 0,
) -> list[list[float]]:
    """Log-probability of every token given those before it, the first 0, at temperature 1.

    Args:
        rank: the data-parallel rank that is to do it; None leaves it to vLLM.
    """
    return await asyncio.gather(*(_score_one(llm, list(sequence), rank, adapter, priority) for sequence in sequences))


async def _score_one(
    llm: AsyncLLM, token_ids: list[int], rank: int | None, adapter: LoRARequest | None, priority: int
) -> list[float]:
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    if len(token_ids) < 2:
        return [0.0] * len(token_ids)
    number = next(_numbers)
    # A salt of its own: keys and values that it leaves in the prefix cache are nobody else's.
    prompt = TokensPrompt(prompt_token_ids=token_ids, cache_salt=f"score-{number}")
    sampling = SamplingParams(
        max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    answers = llm.generate(
        prompt,
        sampling,
        f"score-{number}",
        priority=priority,
        lora_request=adapter,
        data_parallel_rank=rank,
    )
    made: Any = None
    async for made in answers:
        pass
    if made is None or made.prompt_logprobs is None or len(made.prompt_logprobs) != len(token_ids):
        raise WeightsError("vLLM returned no log-probabilities of a prompt")
    found = zip(token_ids[1:], made.prompt_logprobs[1:], strict=True)
    return [0.0, *(float(at[token].logprob) for token, at in found)]


async def check(
    llm: AsyncLLM,
    probes: Sequence[Probe],
    tolerance: float,
    *,
    ranks: int = 1,
    adapter: LoRARequest | None = None,
) -> float:
    """Score the trainer's probes on every data-parallel rank; the largest mean |difference| of log-probabilities.

    Raises:
        WeightsError: it is more than `tolerance`, or not a number.
    """
    if not probes:
        return 0.0
    sequences = [probe.token_ids for probe in probes]
    each = range(ranks) if ranks > 1 else [None]
    scored = await asyncio.gather(
        *(score(llm, sequences, rank=rank, adapter=adapter, priority=FIRST) for rank in each)
    )
    worst = 0.0
    for rank, found in enumerate(scored):
        mean, count = difference(probes, found)
        if not mean <= tolerance:  # also true for NaN
            where = f" on data-parallel rank {rank}" if ranks > 1 else ""
            raise WeightsError(
                f"the probes do not agree after installing{where}: mean |difference| of log-probabilities {mean:.3g} "
                f"over {count} tokens, allowed is {tolerance:g}"
            )
        worst = max(worst, mean)
    return worst


def difference(probes: Sequence[Probe], scored: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Mean |difference| of log-probabilities and over how many tokens; a sequence's first one is not counted."""
    total, count = 0.0, 0
    for probe, logprobs in zip(probes, scored, strict=True):
        for ours, theirs in zip(logprobs[1:], probe.logprobs[1:], strict=True):
            total += abs(ours - theirs)
            count += 1
    return total / max(count, 1), count


def allowed(tolerance: float, *, quantised: bool) -> float:
    """The tolerance that came with the weights, as it is for this engine."""
    return max(QUANTISED_FACTOR * tolerance, QUANTISED_LEAST) if quantised else tolerance
