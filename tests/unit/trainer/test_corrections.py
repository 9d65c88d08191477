"""Corrections of the mismatch between engine and trainer, against float64 loops over documents."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.loss import LossInputs
from prl.messages import Correction, TrainBatch
from prl.testing.numerics import assert_parity, assert_same_bits
from prl_trainer_fsdp.corrections import NONE, correct
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, state

KINDS = ("truncate", "mask_tokens", "mask_sequences")
Document = dict[str, Any]


def document(rng: np.random.Generator, length: int, spread: float) -> Document:
    """Tokens of which some were sampled, some of those trained; the first is never either."""
    sampled = rng.random(length) < 0.7
    sampled[0] = False
    return {
        "logprobs": rng.normal(-2, 1, length),
        "difference": rng.normal(0, spread, length),
        "sampled": sampled,
        "rl": np.where(rng.random(length) < 0.9, rng.choice([0.5, 1.0], length), 0.0) * sampled,
        "ce": rng.choice([0.0, 1.0], length),
    }


def packed(documents: list[Document], padding: int = 0) -> LossInputs:
    def flat(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        rows = [one[name] for one in documents] + ([np.zeros(padding)] if padding else [])
        return torch.tensor(np.concatenate(rows)).to(dtype)

    lengths = [len(one["rl"]) for one in documents] + ([padding] if padding else [])
    logprobs = flat("logprobs").requires_grad_()
    plain = logprobs.detach()
    return LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs),
        sampler_logprobs=(plain.double() - flat("difference", torch.float64)).float(),
        advantages=torch.ones_like(logprobs),
        rl_weights=flat("rl"),
        ce_weights=flat("ce"),
        ref_kl_weights=torch.zeros_like(logprobs),
        sampled=flat("sampled", torch.bool),
        versions=torch.zeros(sum(lengths), dtype=torch.int32),
        cu_seqlens=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        version=0,
        denominators={"rl": 1.0},
    )


def reference(inputs: LossInputs, kind: str, clip: float) -> list[float]:
    """The factor of every token, document by document, token by token."""
    bounds, factors, logprobs = inputs.cu_seqlens.tolist(), [], inputs.logprobs.detach()
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        trained = [bool(inputs.sampled[t]) and float(inputs.rl_weights[t]) != 0 for t in range(first, last)]
        logs = [float(logprobs[t]) - float(inputs.sampler_logprobs[t]) for t in range(first, last)]
        used = [log for log, on in zip(logs, trained, strict=True) if on]
        geometric = math.exp(math.fsum(used) / len(used)) if used else 1.0
        for log, on in zip(logs, trained, strict=True):
            ratio = math.exp(log)
            found = {
                "truncate": min(1.0, clip / ratio),
                "mask_tokens": float(1 / clip <= ratio <= clip),
                "mask_sequences": float(1 / clip <= geometric <= clip),
            }[kind]
            factors.append(found if on else 1.0)
    return factors


MADE = st.builds(
    lambda seed, lengths, spread: [
        document(np.random.default_rng([seed, i]), n, spread) for i, n in enumerate(lengths)
    ],
    st.integers(0, 10_000),
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.05, 1.0, 5.0]),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(made=MADE, clip=st.sampled_from([1.05, 2.0, 5.0]))
def test_weights_and_metrics_are_those_of_a_loop_over_tokens(kind: str, made: list[Document], clip: float) -> None:
    inputs = packed(made)
    found = correct(inputs, Correction(kind, clip))
    factors = torch.tensor(reference(inputs, kind, clip), dtype=torch.float64)
    torch.testing.assert_close(
        found.inputs.rl_weights.double(), inputs.rl_weights.double() * factors, rtol=1e-6, atol=0
    )
    trained = inputs.sampled & (inputs.rl_weights != 0)
    ratio = (inputs.logprobs.double() - inputs.sampler_logprobs.double()).exp().detach()[trained]
    count = len(ratio)
    assert [int(total) for _, total in found.metrics.values()] == [count] * 3
    assert int(found.metrics["share"][0]) == int((factors[trained] != 1).sum())
    assert float(found.metrics["weight"][0]) == pytest.approx(float(factors[trained].sum()), rel=1e-6)
    assert float(found.metrics["ratio_mean"][0]) == pytest.approx(float(ratio.sum()), rel=1e-9)
    assert float(found.ratio_max) == pytest.approx(float(ratio.max()) if count else 0.0, rel=1e-9)
    assert found.inputs.ce_weights is inputs.ce_weights and not found.inputs.rl_weights.requires_grad


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(made=MADE, padding=st.integers(0, 5), turn=st.integers(0, 5))
def test_packing_order_and_padding_change_no_bit(kind: str, made: list[Document], padding: int, turn: int) -> None:
    correction = Correction(kind, 1.5)
    alone = [correct(packed([one]), correction).inputs.rl_weights for one in made]
    together = correct(packed(made, padding), correction).inputs.rl_weights
    assert torch.equal(together[: sum(map(len, alone))], torch.cat(alone))
    turned = made[turn % len(made) :] + made[: turn % len(made)]
    expected = alone[turn % len(made) :] + alone[: turn % len(made)]
    assert torch.equal(correct(packed(turned), correction).inputs.rl_weights, torch.cat(expected))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(made=MADE)
def test_a_ratio_of_one_changes_nothing_and_what_is_not_trained_has_no_say(kind: str, made: list[Document]) -> None:
    inputs = packed(made)
    same = replace(inputs, sampler_logprobs=inputs.logprobs.detach().clone())
    found = correct(same, Correction(kind, 1.05))
    assert torch.equal(found.inputs.rl_weights, same.rl_weights) and not int(found.metrics["share"][0])
    trained = inputs.sampled & (inputs.rl_weights != 0)
    wild = replace(inputs, sampler_logprobs=torch.where(trained, inputs.sampler_logprobs, torch.nan))
    correction = Correction(kind, 1.05)
    assert torch.equal(correct(wild, correction).inputs.rl_weights, correct(inputs, correction).inputs.rl_weights)
    assert correct(inputs, NONE).inputs is inputs and not correct(inputs, NONE).metrics


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_importance_weighted_one_times_the_factor(kind: str) -> None:
    """Of sum w A r: w f A r for every token, f without a gradient of its own. Truncated: w A min(r, C)."""
    made = [document(np.random.default_rng(seed), 9, 1.0) for seed in range(4)]
    inputs = packed(made)
    inputs = replace(inputs, advantages=torch.linspace(-1, 2, len(inputs.logprobs)))
    weights = correct(inputs, Correction(kind, 1.5)).inputs.rl_weights
    ratio = (inputs.logprobs - inputs.sampler_logprobs).exp()
    (weights * inputs.advantages * ratio).sum().backward()
    factors = torch.tensor(reference(inputs, kind, 1.5))
    by_hand = inputs.rl_weights * factors * inputs.advantages * ratio.detach()
    torch.testing.assert_close(inputs.logprobs.grad, by_hand)
    if kind == "truncate":
        truncated = inputs.rl_weights * inputs.advantages * ratio.detach().clamp(max=1.5)
        torch.testing.assert_close(inputs.logprobs.grad, truncated)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_ratios_overflow_nothing_and_what_is_no_number_stays_one(kind: str) -> None:
    inputs = packed([document(np.random.default_rng(3), 8, 0.1)])
    inputs.sampler_logprobs[inputs.rl_weights != 0] = -1e6
    found = correct(inputs, Correction(kind, 2.0))
    assert bool(torch.isfinite(found.inputs.rl_weights).all()) and math.isfinite(float(found.ratio_max))
    broken = replace(inputs, logprobs=torch.full_like(inputs.logprobs, torch.nan))
    weights = correct(broken, Correction(kind, 2.0)).inputs.rl_weights
    assert bool((weights * broken.logprobs).isnan().any()), "a broken forward pass must not be masked away"


# --- in a training step -------------------------------------------------------------------------------------


def under(batch: TrainBatch, correction: Correction) -> TrainBatch:
    return msgspec.structs.replace(batch, correction=correction)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reports_what_was_corrected_and_the_mismatch_as_without(model: Path, tmp_path: Path, kind: str) -> None:
    plain, corrected = (Trainer(run_config(model), tmp_path / name, CPU) for name in ("plain", "corrected"))
    (batch,) = batches(samples(0, surprise=4.0), 1)
    before, after = plain.train(batch).metrics, corrected.train(under(batch, Correction(kind, 1.2))).metrics
    assert not [name for name in before if name.startswith("correction/")]
    assert set(after) - set(before) == {f"correction/{n}" for n in ("share", "weight", "ratio_mean", "ratio_max")}
    assert after["correction/share"] > 0.1 and after["correction/ratio_max"] > 1.2
    assert 0.01 < after["correction/weight"] < 1
    for name in ("mismatch/kl", "mismatch/p99", "mismatch/mean_exp", "mismatch/tokens", "train/trained_tokens"):
        assert after[name] == before[name], name
    assert any(not torch.equal(state(plain)[name], tensor) for name, tensor in state(corrected).items())


@pytest.mark.parametrize("kind", KINDS)
def test_packing_changes_no_corrected_step(model: Path, tmp_path: Path, kind: str) -> None:
    """`sgd`: the weights after it are the gradient."""
    made, ends = samples(1, surprise=4.0), []
    for row_tokens in (10_000, max(s.header.num_tokens for s in made)):
        trainer = Trainer(run_config(model, optimizer="sgd", lr=0.1), tmp_path / str(row_tokens), CPU)
        trainer.train(under(batches(made, 1, row_tokens=row_tokens)[0], Correction(kind, 1.5)))
        ends.append(state(trainer))
    for name, tensor in ends[0].items():
        assert_parity(tensor, ends[1][name], 5e-6, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_band_that_holds_everything_makes_the_step_the_plain_one_to_the_bit(
    model: Path, tmp_path: Path, kind: str
) -> None:
    ends = []
    for name, correction in (("plain", NONE), ("wide", Correction(kind, 1e9))):
        trainer = Trainer(run_config(model), tmp_path / name, CPU)
        trainer.train(under(batches(samples(2, surprise=4.0), 1)[0], correction))
        ends.append(state(trainer))
    assert_same_bits(*ends)
