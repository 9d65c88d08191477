"""Sampling: the right distribution, the right log-probability, nothing but (logits, seed, index)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prl_engine_embedded import sampling
from prl_engine_embedded.sampling import sample, uniforms


def counts(values: range) -> np.ndarray:
    return np.array(list(values), np.uint64)


def test_uniforms_are_splitmix64() -> None:
    """First outputs of the reference implementation for seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected.append(16408922859458223821)
    seeds = np.full(5, 1234567, np.uint64)
    found = uniforms(seeds, counts(range(5)))
    np.testing.assert_array_equal(found, [(value >> 11) * 2.0**-53 for value in expected])


def test_uniforms_are_spread_over_seeds_and_indices() -> None:
    for seeds, indices in ((counts(range(20_000)), counts(range(1))), (counts(range(1)), counts(range(20_000)))):
        found = uniforms(*np.broadcast_arrays(seeds, indices))
        assert abs(found.mean() - 0.5) < 0.01
        assert np.abs(np.bincount((found * 20).astype(int)) / 1000 - 1).max() < 0.15


def test_frequencies_and_logprobs() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 3.0, -30.0])
    for temperature in (1.0, 0.5, 2.0):
        rows = 20_000
        uniform = torch.from_numpy(uniforms(counts(range(rows)), np.zeros(rows, np.uint64)))
        tokens, logprobs = sample(logits.repeat(rows, 1), torch.full((rows,), temperature), uniform)
        expected = torch.log_softmax(logits / temperature, -1)
        torch.testing.assert_close(logprobs, expected[tokens])
        torch.testing.assert_close(tokens.bincount(minlength=5) / rows, expected.exp(), atol=0.015, rtol=0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(50, 20, generator=generator), torch.rand(50, generator=generator).double()
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0] * 10)
    whole = sample(logits, temperatures, uniform)
    monkeypatch.setattr(sampling, "CHUNK", 20 * 7)
    for a, b in zip(whole, sample(logits, temperatures, uniform)):
        assert torch.equal(a, b)


def test_greedy_has_logprobs_at_temperature_one() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits, torch.zeros(50), torch.rand(50, dtype=torch.float64))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).max(-1).values)


def test_edges_never_pick_an_impossible_token() -> None:
    logits = torch.full((4, 6), -torch.inf)
    logits[:, 2:4] = torch.tensor([0.0, -40.0])
    uniform = torch.tensor([0.0, 0.5, 1 - 2.0**-53, 1 - 2.0**-30], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(4), uniform)
    assert set(tokens.tolist()) <= {2, 3}
    assert torch.isfinite(logprobs).all()


def test_broken_logits_show_in_the_logprob() -> None:
    logits = torch.zeros(4, 6)
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    for temperature in (0.0, 1.0):
        _, logprobs = sample(logits, torch.full((4,), temperature), torch.full((4,), 0.5, dtype=torch.float64))
        assert torch.isfinite(logprobs).tolist() == [False, False, False, True]
