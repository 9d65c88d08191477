"""Recomputation changes nothing; bfloat16 trains float32 parameters and publishes what it computes with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prl.config.schema import RunConfig
from prl.testing.numerics import assert_same_bits, relative_error
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, state


@pytest.fixture
def group() -> Iterator[None]:
    """bfloat16 in one process makes a process group of its own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def in_bfloat16(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})


def trained(config: RunConfig, at: Path) -> Trainer:
    trainer = Trainer(config, at, CPU)
    for step in (1, 2):
        trainer.train(batches(samples(step, step - 1), step)[0])
    return trainer


def test_recomputing_changes_no_bit(model: Path, tmp_path: Path) -> None:
    kept = trained(run_config(model), tmp_path / "kept")
    recomputed = trained(run_config(model, recompute="full"), tmp_path / "recomputed")
    assert_same_bits(state(kept), state(recomputed))
    assert kept.publish(2).num_bytes == recomputed.publish(2).num_bytes


def test_recomputing_computes_again(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(model, recompute="full"), tmp_path, CPU)
    calls = []
    inner = trainer.learner.model.blocks[0].self_attn
    inner.register_forward_hook(lambda *_: calls.append(1))
    trainer.train(batches(samples(1), 1, row_tokens=10_000)[0])
    assert len(calls) == 2


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bfloat16_computes_with_copies_of_float32_parameters(
    model: Path, tmp_path: Path, group: None, recompute: str
) -> None:
    config = run_config(model, recompute=recompute, lr=1e-3)
    exact, rounded = trained(config, tmp_path / "exact"), trained(in_bfloat16(config), tmp_path / "rounded")
    reference = rounded.publish(2)
    received = rounded.config.channel.build().receiver().receive(reference)
    assert {tensor.dtype for tensor in received.tensors.values()} == {torch.bfloat16}
    assert received.tolerance == 0.15
    from prl_trainer_fsdp.parallel import gather

    for name, parameter in rounded.learner.parameters():
        whole = gather(parameter.detach())
        assert whole.dtype == torch.float32
        assert torch.equal(whole.bfloat16(), received.tensors[name]), name
        assert relative_error(state(exact)[name], whole) < 0.02, name
    files = rounded.checkpoint(2, tmp_path / "saved")
    alone = Trainer(config, tmp_path / "alone", CPU)
    alone.load_checkpoint(tmp_path / "saved")
    assert files and alone.version == 2
