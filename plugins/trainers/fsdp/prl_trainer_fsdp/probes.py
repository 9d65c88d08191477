"""The sequences that engines must reproduce after installing weights: what the policy has just sampled.

On those the mismatch KL of a version can be estimated before anything is sampled with it, so they are chosen for that:
sampled tokens, as many as are cheap to score, after enough of their context to be as likely as when they were sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from prl.messages import TrainSample
from prl.protocols import Probe
from prl.types import SampleBody

CONTEXT_TOKENS, ANSWER_TOKENS = 80, 48
"""Longest parts of a probe: every engine scores all of them after each install, while answers wait. Eight of these are
384 sampled tokens, and some 200 where answers are short."""
RANDOM_TOKENS = 12
TOLERANCES = {"float32": (1e-3, 0.0), "bfloat16": (0.15, 0.02)}
"""Mean absolute difference of log-probabilities that two correct implementations show at most: a constant, and a share
of the mean of their absolute values. Rounding is relative: SmolLM2 in bfloat16, beside float32: 0.04 on what it samples
itself (mean log-probability -2.2), 0.08 on the beginning of a prompt (-6.4), 0.11 on random tokens (-15.3), which is
0.035 + 0.005 of that value; here are three times as much for both sides. A torn tensor makes 0.6 and more."""

_decode_body = msgspec.msgpack.Decoder(SampleBody).decode


def random(count: int, vocab_size: int, seed: int) -> list[Probe]:
    """Before anything was trained. The policy sampled none of their tokens."""
    rng = np.random.default_rng(seed)
    drawn = ([int(token) for token in rng.integers(0, vocab_size, RANDOM_TOKENS)] for _ in range(count))
    return [Probe(tokens, [], first=RANDOM_TOKENS) for tokens in drawn]


def recent(samples: Iterable[TrainSample], count: int) -> list[Probe]:
    """Of `count` samples the beginning of the longest turn, with what stands before it. They are spread evenly over
    those whose turns are long enough; none where nothing was sampled. Log-probabilities are left empty."""
    found = [(max(sample.header.runs, key=lambda run: run[1]), sample) for sample in samples if sample.header.runs]
    lengths = sorted((min(length, ANSWER_TOKENS) for (_, length), _ in found), reverse=True)[:count]
    if not lengths:
        return []
    fit = [(run, sample) for run, sample in found if run[1] >= lengths[-1]]
    chosen = np.linspace(0, len(fit) - 1, len(lengths)).astype(int)
    probes = [_piece(*fit[index]) for index in chosen]
    return [probe for probe in probes if len(probe.token_ids) > 1]


def _piece(run: tuple[int, int], sample: TrainSample) -> Probe:
    start, length = run
    begin = max(0, start - CONTEXT_TOKENS)
    tokens = _decode_body(sample.body).segment().token_ids[begin : start + min(length, ANSWER_TOKENS)]
    return Probe(tokens.tolist(), [], first=max(1, start - begin))


def tolerance(dtype: str, probes: Sequence[Probe]) -> float:
    """What `mismatch.probe_tolerance` = 0 chooses."""
    constant, share = TOLERANCES[dtype]
    values = [abs(value) for probe in probes for value in probe.logprobs[1:]]
    return constant + share * sum(values) / max(1, len(values))
