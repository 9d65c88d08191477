"""Which sequences engines must reproduce: what was sampled last, after its context."""

from __future__ import annotations

import msgspec
import numpy as np

from prl.messages import TrainSample
from prl.types import Credit, SampleBody, SampleHeader
from prl_trainer_fsdp import probes
from prl_trainer_fsdp.probes import ANSWER_TOKENS, CONTEXT_TOKENS


def sample(length: int, *runs: tuple[int, int], first: int = 0) -> TrainSample:
    """Tokens first, first + 1, ...; sampled where `runs` says."""
    tokens = np.arange(first, first + length, dtype="<i4")
    sampled = np.zeros(length, bool)
    for start, count in runs:
        sampled[start : start + count] = True
    body = SampleBody(tokens.tobytes(), sampled.tobytes(), np.zeros(length, "<f4").tobytes(), tokens.tobytes())
    return TrainSample(SampleHeader(length, runs, 0, 0), Credit((), ()), msgspec.msgpack.encode(body))


def test_a_probe_is_the_beginning_of_the_longest_turn_after_its_context() -> None:
    (probe,) = probes.recent([sample(700, (100, 10), (300, 200), (600, 20))], 8)
    assert probe.token_ids == list(range(300 - CONTEXT_TOKENS, 300 + ANSWER_TOKENS))
    assert probe.first == CONTEXT_TOKENS and probe.token_ids[probe.first] == 300
    (short,) = probes.recent([sample(30, (20, 10))], 8)
    assert short.token_ids == list(range(30)) and short.first == 20
    (bare,) = probes.recent([sample(4, (0, 4))], 8)
    assert bare.first == 1, "a sequence's first token has no log-probability"


def test_those_with_most_sampled_tokens_are_taken_and_spread() -> None:
    long = [sample(100, (20, 70), first=1000 * index) for index in range(10)]
    few = [sample(30, (20, 9), first=90_000)] * 50
    chosen = probes.recent([*few, *long], 4)
    assert [probe.token_ids[0] // 1000 for probe in chosen] == [0, 3, 6, 9]
    assert [len(probe.token_ids) - probe.first for probe in chosen] == [ANSWER_TOKENS] * 4
    mixed = probes.recent([*few, *long], 12)
    assert len(mixed) == 12 and mixed[0].token_ids[0] == 90_000, "too few are long: the others count as well"


def test_without_anything_sampled_or_wanted_there_are_none() -> None:
    assert probes.recent([], 8) == probes.recent([sample(9)], 8) == probes.recent([sample(9, (4, 5))], 0) == []
    assert probes.recent([sample(1, (0, 1))], 8) == [], "nothing of it can be scored"


def test_before_the_first_step_nothing_is_said_to_be_sampled() -> None:
    made = probes.random(8, 50, 3)
    assert len(made) == 8 and all(probe.first == len(probe.token_ids) for probe in made)
