"""Sampling by counter: token number `index` of a request depends on its logits, its seed and `index`, nothing else.

A uniform number comes from splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014,
figure 17) at position `index + 1` of the stream that starts at `seed`; the token is the inverse of the cumulative
distribution there. Both are row-wise, so neither slot nor companions matter.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK = 2**24
"""Logits sampled from at once: with 150,000 tokens and 256 rows their cumulative sums alone would be 300 MB."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for every (seed, index) pair, with 53 random bits."""
    z = seeds + (indices + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: f32[B, V]. temperatures: f32[B], 0 is greedy. uniform: f64[B] in [0, 1).

    Returns:
        token ids i64[B] and their log-probabilities f32[B] at the row's temperature (1 where it is greedy). A row whose
        logits are NaN or +inf has a log-probability that is not finite.
    """
    rows = max(1, CHUNK // logits.shape[1])
    if logits.shape[0] <= rows:
        return _sample(logits, temperatures, uniform)
    parts = [_sample(*part) for part in zip(*(whole.split(rows) for whole in (logits, temperatures, uniform)))]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    greedy = temperatures == 0
    scale = torch.where(greedy, torch.ones_like(temperatures), temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # u * total may round up to total itself, which lies past the last token that has any probability.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(dim=-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
