"""The losses: values against the formula, gradients against numbers, and what may never change them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from prl.errors import RunFailed
from prl.loss import LossInputs
from prl_losses.ce import cross_entropy_loss
from prl_losses.config import DppoConfig
from prl_losses.dppo import MAX_LOG_RATIO, build


def row(tokens: int = 24, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> LossInputs:
    """A row of two documents: a third of its tokens is a prompt, some of the rest carry ce weight."""
    random = torch.Generator().manual_seed(seed)
    uniform = lambda: torch.rand(tokens, generator=random, dtype=dtype)  # noqa: E731
    sampled = torch.arange(tokens) % 3 != 0
    mu = -3.0 * uniform()
    values: dict[str, object] = {
        "logprobs": (mu + 0.3 * (uniform() - 0.5)).requires_grad_(),
        "entropy": uniform(),
        "sampler_logprobs": torch.where(sampled, mu, 0.0),
        "advantages": 2.0 * uniform() - 1.0,
        "rl_weights": sampled.to(dtype),
        "ce_weights": torch.where(sampled, 0.0, uniform()),
        "ref_kl_weights": torch.zeros(tokens, dtype=dtype),
        "sampled": sampled,
        "versions": torch.where(sampled, 3, -1),
        "cu_seqlens": torch.tensor([0, tokens // 2, tokens]),
        "version": 3,
        "denominators": {"rl": 16.0, "ce": 8.0},
    }
    return LossInputs(**{**values, **changes})  # type: ignore[arg-type]


def one(logprob: float, sampler: float, advantage: float, **settings: float) -> tuple[float, float]:
    """Loss and gradient of a row of one trained token with denominator 1."""
    lp = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    inputs = row(
        1,
        logprobs=lp,
        sampled=torch.tensor([True]),
        sampler_logprobs=torch.tensor([sampler], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        rl_weights=torch.ones(1, dtype=torch.float64),
        ce_weights=torch.zeros(1, dtype=torch.float64),
        denominators={"rl": 1.0},
    )
    loss = build(DppoConfig(**settings))(inputs).loss
    (gradient,) = torch.autograd.grad(loss, lp)
    return loss.item(), gradient.item()


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_a_kept_token_is_the_importance_weighted_gradient_plus_the_regulariser(advantage: float) -> None:
    pi, mu = 0.30, 0.25
    log_ratio = math.log(pi / mu)
    loss, gradient = one(math.log(pi), math.log(mu), advantage)
    assert loss == pytest.approx(-advantage * pi / mu + 1e-3 * log_ratio**2)
    assert gradient == pytest.approx(-advantage * pi / mu + 2e-3 * log_ratio)


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "dropped"),
    [
        (0.71, 0.50, 1.0, True),
        (0.69, 0.50, 1.0, False),
        (0.29, 0.50, -1.0, True),
        (0.31, 0.50, -1.0, False),
        (0.29, 0.50, 1.0, False),  # fell, but its advantage pulls it back up
        (0.71, 0.50, -1.0, False),
        (0.29, 0.50, 0.0, True),  # zero counts with the negative ones
        (1e-3, 1e-6, 1.0, False),  # a ratio of 1000 moves almost no probability
    ],
)
def test_a_token_is_dropped_by_its_probability_difference(
    pi: float, mu: float, advantage: float, dropped: bool
) -> None:
    _, gradient = one(math.log(pi), math.log(mu), advantage, kl_tau=0.0)
    assert (gradient == 0.0) == (dropped or advantage == 0.0)
    loss, _ = one(math.log(pi), math.log(mu), advantage, kl_tau=0.5)
    kept = 0.0 if dropped else -advantage * pi / mu
    assert loss == pytest.approx(kept + 0.5 * math.log(pi / mu) ** 2), "the regulariser holds for dropped tokens too"


def test_adv_tau_scales_the_advantage_and_weights_scale_the_whole_term() -> None:
    inputs = row(denominators={"rl": 16.0})
    loss = build(DppoConfig(adv_tau=2.0))
    doubled = dataclasses.replace(inputs, advantages=2 * inputs.advantages)
    assert loss(inputs).loss.item() == pytest.approx(build(DppoConfig())(doubled).loss.item())
    inputs = dataclasses.replace(inputs, ce_weights=torch.zeros_like(inputs.ce_weights))
    halved = dataclasses.replace(inputs, rl_weights=inputs.rl_weights / 2)
    assert loss(halved).loss.item() == pytest.approx(loss(inputs).loss.item() / 2)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_the_numerical_one(seed: int) -> None:
    inputs = row(seed=seed)
    loss = build(DppoConfig())
    assert torch.autograd.gradcheck(
        lambda lp: loss(dataclasses.replace(inputs, logprobs=lp)).loss, inputs.logprobs, eps=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("order_seed", range(3))
def test_neither_order_nor_packing_nor_padding_changes_the_gradient(order_seed: int) -> None:
    inputs = row()
    whole = gradient_of(inputs, torch.arange(24))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(order_seed))
    parts = torch.zeros(24, dtype=torch.float64)
    for part in order.split(7):
        parts[part] = gradient_of(inputs, part)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-15)
    padded = row(24)
    padding = {
        name: torch.cat([getattr(padded, name), torch.full((5,), fill, dtype=getattr(padded, name).dtype)])
        for name, fill in PADDING.items()
    }
    padding["logprobs"] = padding["logprobs"].detach().requires_grad_()
    padded = dataclasses.replace(padded, **padding)
    with_padding = gradient_of(padded, torch.arange(29))
    torch.testing.assert_close(with_padding[:24], whole, rtol=1e-12, atol=1e-15)
    assert not with_padding[24:].any()


PADDING = {
    "logprobs": float("-inf"), "entropy": float("nan"), "sampler_logprobs": float("inf"), "advantages": float("nan"),
    "rl_weights": 0.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "sampled": True, "versions": -1,
}  # fmt: skip
TENSORS = tuple(PADDING)


def gradient_of(inputs: LossInputs, chosen: torch.Tensor) -> torch.Tensor:
    """Gradient by token of a row that holds only the `chosen` tokens."""
    picked = {name: getattr(inputs, name).detach()[chosen] for name in TENSORS}
    picked["logprobs"].requires_grad_()
    loss = build(DppoConfig())(dataclasses.replace(inputs, **picked)).loss
    assert torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(loss, picked["logprobs"])
    return gradient


def test_only_sampled_tokens_have_a_policy_gradient() -> None:
    inputs = row(rl_weights=torch.ones(24, dtype=torch.float64), ce_weights=torch.zeros(24, dtype=torch.float64))
    gradient = gradient_of(inputs, torch.arange(24))
    assert not gradient[~inputs.sampled].any()
    assert gradient[inputs.sampled].all()


def test_mixed_batches_add_their_components_each_over_its_own_denominator() -> None:
    inputs = row()
    no_ce = dataclasses.replace(inputs, ce_weights=torch.zeros_like(inputs.ce_weights))
    policy = build(DppoConfig())(no_ce).loss.item()
    supervised = -(inputs.logprobs * inputs.ce_weights).sum().item() / 8.0
    assert build(DppoConfig())(inputs).loss.item() == pytest.approx(policy + supervised)
    coarser = dataclasses.replace(inputs, denominators={"rl": 32.0, "ce": 8.0})
    assert build(DppoConfig())(coarser).loss.item() == pytest.approx(policy / 2 + supervised)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-5.0, 5.0])
@pytest.mark.parametrize(
    ("logprob", "sampler"), [(0.0, -700.0), (-700.0, 0.0), (-math.inf, -1.0), (-1e30, -1e30), (0, 0)]
)
def test_finite_at_extremes(dtype: torch.dtype, advantage: float, logprob: float, sampler: float) -> None:
    lp = torch.tensor([logprob, -1.0], dtype=dtype, requires_grad=True)
    inputs = row(
        2,
        dtype=dtype,
        logprobs=lp,
        sampler_logprobs=torch.tensor([sampler, -1.0], dtype=dtype),
        advantages=torch.full((2,), advantage, dtype=dtype),
        sampled=torch.tensor([True, True]),
        rl_weights=torch.ones(2, dtype=dtype),
        denominators={"rl": 2.0},
    )
    out = build(DppoConfig())(dataclasses.replace(inputs, ce_weights=torch.zeros(2, dtype=dtype)))
    (gradient,) = torch.autograd.grad(out.loss, lp)
    assert torch.isfinite(out.loss) and torch.isfinite(gradient).all()
    assert all(math.isfinite(float(total)) for total, _ in out.metrics.values())
    if abs(logprob - sampler) > MAX_LOG_RATIO:
        assert gradient[0] == 0.0
    assert torch.isfinite(gradient.square().sum())


def test_the_clamp_touches_nothing_below_its_limit() -> None:
    loss, gradient = one(-1.0 - MAX_LOG_RATIO + 0.01, -1.0, 1.0, delta_low=1.0)
    assert gradient == pytest.approx(2e-3 * -(MAX_LOG_RATIO - 0.01), rel=1e-4) and loss > 0


def test_metrics_are_sums_and_counts_of_trained_tokens() -> None:
    inputs = row()
    metrics = build(DppoConfig())(inputs).metrics
    assert int(metrics["ratio"][1]) == int(inputs.sampled.sum()) == 16
    assert int(metrics["nll"][1]) == int((inputs.ce_weights != 0).sum())
    ratio = (inputs.logprobs - inputs.sampler_logprobs)[inputs.sampled].exp().sum().item()
    assert float(metrics["ratio"][0]) == pytest.approx(ratio)
    assert all(not getattr(value, "requires_grad", False) for pair in metrics.values() for value in pair)


def test_cross_entropy_is_the_weighted_token_mean() -> None:
    inputs = row(denominators={"ce": 8.0})
    out = cross_entropy_loss(inputs)
    assert out.loss.item() == pytest.approx(-(inputs.logprobs * inputs.ce_weights).sum().item() / 8.0)
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprobs)
    torch.testing.assert_close(gradient, -inputs.ce_weights / 8.0)


def test_a_component_that_a_loss_cannot_train_is_refused() -> None:
    with pytest.raises(RunFailed, match="'ce' does not train the component 'rl'"):
        cross_entropy_loss(row())
    with pytest.raises(RunFailed, match="'dppo' does not train the component 'ref_kl'"):
        build(DppoConfig())(row(denominators={"rl": 16.0, "ref_kl": 12.0}))
    cross_entropy_loss(row(denominators={"rl": 1.0, "ce": 8.0}))  # 1 is what an absent component may have
