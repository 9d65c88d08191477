"""Schedules, decay and clipping."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.optim import Optimizer, clip
from prl_trainer_fsdp.schedules import learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    config = FsdpConfig.model_validate({"lr": 1.0, **keys})
    return [learning_rate(config, step) for step in range(1, steps + 1)]


def test_constant_after_a_warm_up() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_its_share_and_stays_there() -> None:
    found = rates(8, schedule="linear", warmup_steps=2, decay_steps=6, min_lr_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    found = rates(9, schedule="cosine", decay_steps=8, min_lr_ratio=0.1)
    assert found[3] == pytest.approx(0.55)
    assert found[7] == found[8] == pytest.approx(0.1)
    assert found == sorted(found, reverse=True)


def test_a_schedule_needs_an_end() -> None:
    with pytest.raises(ValidationError, match="needs decay_steps"):
        FsdpConfig(schedule="linear")


def test_only_matrices_decay() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer(FsdpConfig(weight_decay=0.1), [("m", matrix), ("v", vector)])
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(0.5)
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))


def test_clipping_scales_all_gradients_together() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert float(clip([first, second], 0.0)) == 5.0
    assert float(clip([first, second], 1.0)) == 5.0
    assert torch.allclose(torch.cat([first.grad, second.grad]), torch.tensor([0.6, 0.8]), atol=1e-6)
    assert float(clip([first, second], 2.0)) == pytest.approx(1.0)
    assert torch.allclose(first.grad, torch.tensor([0.6]), atol=1e-6)
