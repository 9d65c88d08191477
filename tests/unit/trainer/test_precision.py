"""bfloat16 trains float32 parameters and publishes what it computes with; gradients of rows are summed in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from prl.rows import PackedRow, assemble
from prl.testing.numerics import relative_error
from prl_trainer_fsdp.parallel.sharding import gather
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, state, trained


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_bfloat16_computes_with_copies_of_float32_parameters(
    model: Path, tmp_path: Path, group: None, impl: str, recompute: str
) -> None:
    keys: dict[str, Any] = {"recompute": recompute, "lr": 1e-3}
    config = run_config(model, **keys)
    exact = trained(config, tmp_path / "exact")
    rounded = trained(run_config(model, impl=impl, dtype="bfloat16", **keys), tmp_path / "rounded")
    sharded = any(isinstance(p, DTensor) for _, p in rounded.learner.parameters())
    assert sharded == (impl == "hf"), "a model that casts where it uses its weights needs no second copy of them"
    reference = rounded.publish(2)
    received = rounded.config.channel.build().receiver().receive(reference)
    assert {tensor.dtype for tensor in received.tensors.values()} == {torch.bfloat16}
    values = [abs(value) for probe in received.probes for value in probe.logprobs[1:]]
    assert received.tolerance == pytest.approx(0.15 + 0.02 * sum(values) / len(values)), "rounding is relative"
    for name, parameter in rounded.learner.parameters():
        whole = gather(parameter.detach())
        assert whole.dtype == torch.float32
        assert torch.equal(whole.bfloat16(), received.tensors[name]), name
        assert relative_error(state(exact)[name], whole) < 0.02, name
    rounded.snapshot(2)
    files = rounded.checkpoint(2, tmp_path / "saved")
    alone = Trainer(config, tmp_path / "alone", CPU)
    alone.load_checkpoint(tmp_path / "saved")
    assert files and alone.version == 2


def gradients(trainer: Trainer, rows: list[PackedRow], denominators: dict[str, float]) -> dict[str, torch.Tensor]:
    """What a step hands to its optimiser."""
    found: dict[str, torch.Tensor] = {}

    def keep(rate: float) -> None:
        for name, parameter in trainer.learner.parameters():
            assert parameter.grad is not None
            found[name] = gather(parameter.grad).clone()

    trainer.learner.optimizer.step = keep  # type: ignore[method-assign]
    trainer.learner.step(rows, denominators, 0)
    return found


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_gradients_of_rows_are_summed_in_float32(model: Path, tmp_path: Path, group: None, impl: str) -> None:
    trainer = Trainer(run_config(model, impl=impl, dtype="bfloat16", max_grad_norm=0), tmp_path, CPU)
    update = batches(samples(1, groups=6), 1)[0].updates[0]
    rows = [assemble(row) for row in update.rows]
    assert len(rows) > 2
    together = gradients(trainer, rows, update.denominators)
    parts = [gradients(trainer, [row], update.denominators) for row in rows]
    for name, value in together.items():
        total = torch.zeros_like(value)
        for part in parts:
            total += part[name]
        assert value.dtype == torch.float32 and torch.equal(total, value), name
        assert not torch.equal(value, value.bfloat16().float()), f"{name} would lose bits in bfloat16"


def test_masters_keep_steps_that_bfloat16_would_round_away(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(model, dtype="bfloat16", lr=1e-6), tmp_path, CPU)
    before = state(trainer)
    moved = []
    for step in (1, 2, 3):
        trainer.train(batches(samples(1, step - 1), step)[0])
        moved.append({name: value - before[name] for name, value in state(trainer).items()})
    for name, value in moved[-1].items():
        same = (before[name].bfloat16() == (before[name] + value).bfloat16()).float().mean()
        assert same > 0.9, "the step is too small to show in most of the copies"
        assert value.norm() > 2.5 * moved[0][name].norm() > 0, f"{name} does not add up its steps"
