"""An exported checkpoint is a Hugging Face folder with exactly the trained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prl import registry
from prl.errors import StoreError
from prl.rundir import RunDir
from prl_trainer_fsdp.checkpoint import Reader, read_index
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, save_model


@pytest.fixture
def run(model: Path, tmp_path: Path) -> RunDir:
    """A run directory as far as exporting reads it: configuration, one checkpoint of one step."""
    run = RunDir(tmp_path / "run")
    config = run_config(model)
    trainer = Trainer(config, run.path, CPU)
    trainer.train(batches(samples(1, 0), 1)[0])
    trainer.snapshot(1)
    trainer.checkpoint(1, run.checkpoint(1) / "trainer")
    run.config.write_text(config.model_dump_json())
    return run


def trained(run: RunDir) -> dict[str, torch.Tensor]:
    index = read_index(run.checkpoint(1) / "trainer")
    with Reader(index) as reader:
        return {name: reader.whole("parameter", name) for name in index.of("parameter")}


def test_the_folder_holds_the_trained_weights(run: RunDir, model: Path, tmp_path: Path) -> None:
    registry.build("trainers", "fsdp").export(run, 1, tmp_path / "out")
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    before = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    weights = trained(run)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights.items())


def test_a_damaged_checkpoint_is_refused(run: RunDir, tmp_path: Path) -> None:
    file = run.checkpoint(1) / "trainer" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="was altered"):
        registry.build("trainers", "fsdp").export(run, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(run: RunDir, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", tied=False)
    run.config.write_text(run_config(other).model_dump_json())
    with pytest.raises(StoreError, match="another model"):
        registry.build("trainers", "fsdp").export(run, 1, tmp_path / "out")
