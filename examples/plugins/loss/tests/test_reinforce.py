"""The contract that every loss keeps, and this one's gradient worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from acme_reinforce.config import ReinforceConfig
from acme_reinforce.loss import Reinforce
from prl.testing.contracts import loss as contract
from prl.testing.numerics import loss_row


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_is_a_loss(check) -> None:
    check(lambda: Reinforce(ReinforceConfig()))


@pytest.mark.parametrize("max_weight", [1.0, 2.0, 1e6])
def test_the_gradient_is_the_truncated_importance_weight_times_the_advantage(max_weight: float) -> None:
    inputs = loss_row(components=["rl"])
    shifted = (inputs.sampler_logprobs - 1.5).where(inputs.sampled, inputs.sampler_logprobs)
    inputs = dataclasses.replace(inputs, sampler_logprobs=shifted)
    out = Reinforce(ReinforceConfig(max_weight=max_weight))(inputs)
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprobs)
    ratio = (inputs.logprobs.detach() - inputs.sampler_logprobs).exp()
    weight = inputs.rl_weights * inputs.sampled / inputs.denominators["rl"]
    expected = -ratio.clamp(max=max_weight) * inputs.advantages * weight
    assert torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12)
    cut, count = out.metrics["cut"]
    assert (float(cut) > 0) == (max_weight < 100) and float(count) > 0
