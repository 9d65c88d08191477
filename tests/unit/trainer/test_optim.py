"""Schedules, optimisers against torch's own, their state by name, decay and clipping."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from prl.testing.numerics import assert_parity, assert_same_bits
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.optim import Optimizer, clip
from prl_trainer_fsdp.optim.muon import Muon, orthogonalise
from prl_trainer_fsdp.optim.schedules import learning_rate


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


def parameters(seed: int = 0) -> list[tuple[str, torch.nn.Parameter]]:
    torch.manual_seed(seed)
    return [("m", torch.nn.Parameter(torch.randn(6, 4))), ("v", torch.nn.Parameter(torch.randn(5)))]


def steps(made: list[tuple[str, torch.nn.Parameter]], step: Callable[[], object], count: int = 4) -> dict[str, Tensor]:
    for index in range(count):
        torch.manual_seed(100 + index)
        for _, parameter in made:
            parameter.grad = torch.randn_like(parameter)
        step()
    return {name: parameter.detach() for name, parameter in made}


@pytest.mark.parametrize(
    ("keys", "reference"),
    [
        ({"optimizer": "adamw"}, lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999), fused=True)),
        ({"optimizer": "sgd"}, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.95, fused=True)),
        ({"optimizer": "sgd", "momentum": 0.0}, lambda groups: torch.optim.SGD(groups, lr=0.1, fused=True)),
    ],
)
def test_state_made_before_the_first_step_is_the_one_that_torch_makes_in_it(
    keys: dict[str, object], reference: Callable[[object], torch.optim.Optimizer]
) -> None:
    own, torchs = parameters(), parameters()
    optimizer = Optimizer(FsdpConfig.model_validate({"weight_decay": 0.2, **keys}), own)
    groups = [{"params": [p], "weight_decay": decay} for (_, p), decay in zip(torchs, (0.2, 0.0), strict=True)]
    assert_same_bits(steps(torchs, reference(groups).step), steps(own, lambda: optimizer.step(0.1)))


def test_muon_on_a_whole_matrix_is_torchs_bit_for_bit() -> None:
    torch.manual_seed(0)
    for shape in ((6, 20), (20, 6), (9, 9)):
        reference = torch.nn.Parameter(torch.randn(shape))
        own = reference.detach().clone()
        keys = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
        torchs = torch.optim.Muon([reference], adjust_lr_fn="match_rms_adamw", **keys)  # type: ignore[arg-type]
        ours = Muon([own], {}, dtype=torch.bfloat16, **keys)
        for _ in range(4):
            reference.grad = torch.randn(shape)
            own.grad = reference.grad.clone()
            torchs.step()
            ours.step()
        assert torch.equal(own, reference), shape


def test_muon_makes_all_singular_values_alike_and_keeps_singular_vectors() -> None:
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(12, 8), full_matrices=False)
    found = orthogonalise(u @ torch.diag(torch.logspace(0, -1.5, 8)) @ v, torch.float32)
    inner = u.T @ found @ v.T
    assert inner.diag().min() > 0.6 and inner.diag().max() < 1.3
    assert_parity(inner.diag().diag(), inner, 1e-5)


def test_muon_takes_each_matrix_of_a_stack_by_itself() -> None:
    stack = torch.randn(3, 6, 4)
    one = orthogonalise(stack, torch.float32)
    assert_parity(torch.stack([orthogonalise(matrix, torch.float32) for matrix in stack]), one, 1e-6)


def test_muon_gets_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    block = torch.nn.Linear(4, 4)
    head, frozen = torch.nn.Parameter(torch.randn(9, 4)), torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    named = [("w", block.weight), ("b", block.bias), ("head", head), ("frozen", frozen)]
    optimizer = Optimizer(FsdpConfig(optimizer="muon"), named, [block])
    keys = {"w": ["momentum_buffer"], **{name: ["exp_avg", "exp_avg_sq", "step"] for name in ("b", "head")}}
    wanted = {f"{key}.{name}" for name, of in keys.items() for key in of}
    assert {name for name, _ in optimizer.named_state()} == wanted


def test_state_by_name_is_complete_before_the_first_step_and_can_be_put_back() -> None:
    config = FsdpConfig(optimizer="adamw")
    first, second = parameters(), parameters()
    one, two = Optimizer(config, first), Optimizer(config, second)
    blank = dict(one.named_state())
    assert all(not value.any() for value in blank.values())
    steps(first, lambda: one.step(0.1))
    with torch.no_grad():
        for (_, parameter), (_, value) in zip(second, first, strict=True):
            parameter.copy_(value)
    saved = {name: value.clone() for name, value in one.named_state()}
    assert saved.keys() == blank.keys() and saved["step.m"] == 4
    two.load_state(saved)
    assert_same_bits(steps(first, lambda: one.step(0.1), 1), steps(second, lambda: two.step(0.1), 1))
    with pytest.raises(KeyError, match=r"step\.m"):
        two.load_state({})


def test_clipping_scales_all_gradients_together() -> None:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert float(clip([first, second], 0.0)) == 5.0
    assert float(clip([first, second], 1.0)) == 5.0
    assert torch.allclose(torch.cat([first.grad, second.grad]), torch.tensor([0.6, 0.8]), atol=1e-6)
    assert float(clip([first, second], 2.0)) == pytest.approx(1.0)
    assert torch.allclose(first.grad, torch.tensor([0.6]), atol=1e-6)
