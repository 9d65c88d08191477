"""Checkpoints continue to the bit, and damaged ones are refused with a reason."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from prl.errors import StoreError
from prl.testing.numerics import assert_same_bits
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, save_model, state

SCHEDULE = {"schedule": "cosine", "decay_steps": 10, "warmup_steps": 2, "weight_decay": 0.1}


def advance(trainer: Trainer, first: int, last: int) -> list[dict[str, float]]:
    return [trainer.train(batches(samples(step, step - 1), step)[0]).metrics for step in range(first, last + 1)]


def test_five_and_five_steps_are_ten(model: Path, tmp_path: Path) -> None:
    config = run_config(model, **SCHEDULE)
    whole = Trainer(config, tmp_path / "whole", CPU)
    expected = advance(whole, 1, 10)[5:]
    first = Trainer(config, tmp_path / "first", CPU)
    advance(first, 1, 5)
    files = first.checkpoint(5, tmp_path / "saved")
    second = Trainer(config, tmp_path / "second", CPU)
    second.load_checkpoint(tmp_path / "saved")
    assert second.version == 5
    assert advance(second, 6, 10) == expected
    assert_same_bits(state(whole), state(second))
    for name, digest in files.items():
        assert hashlib.sha256((tmp_path / "saved" / name).read_bytes()).hexdigest() == digest
    assert sorted(files) == ["model.safetensors", "optimizer.safetensors", "trainer.json"]


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    trainer = Trainer(run_config(model), tmp_path / "run", CPU)
    advance(trainer, 1, 1)
    trainer.checkpoint(1, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_truncated_file_is_refused(saved: Path, model: Path, tmp_path: Path, name: str) -> None:
    file = saved / name
    file.write_bytes(file.read_bytes()[:-7])
    trainer = Trainer(run_config(model), tmp_path / "again", CPU)
    before = state(trainer)
    with pytest.raises(StoreError, match=f"{name} is truncated: .* bytes instead of"):
        trainer.load_checkpoint(saved)
    assert_same_bits(before, state(trainer))


def test_a_changed_bit_is_refused(saved: Path, model: Path, tmp_path: Path) -> None:
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(StoreError, match="was altered"):
        Trainer(run_config(model), tmp_path / "again", CPU).load_checkpoint(saved)


def test_a_missing_file_is_refused(saved: Path, model: Path, tmp_path: Path) -> None:
    (saved / "optimizer.safetensors").unlink()
    with pytest.raises(StoreError, match=r"optimizer\.safetensors is missing"):
        Trainer(run_config(model), tmp_path / "again", CPU).load_checkpoint(saved)
    with pytest.raises(StoreError, match="holds no checkpoint of a trainer"):
        Trainer(run_config(model), tmp_path / "again", CPU).load_checkpoint(tmp_path)


def test_another_models_checkpoint_is_refused(saved: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "untied", tied=False)
    with pytest.raises(StoreError, match=r"another model: the checkpoint lacks 'lm_head\.weight'"):
        Trainer(run_config(other), tmp_path / "again", CPU).load_checkpoint(saved)


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    for file in saved.iterdir():
        data = file.read_bytes()
        if file.suffix == ".json":
            json.loads(data)
        else:
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            assert all("data_offsets" in entry for name, entry in header.items() if name != "__metadata__")


def test_a_full_disk_is_a_store_error(saved: Path, model: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(model), tmp_path / "again", CPU)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        trainer.checkpoint(1, tmp_path / "file" / "below")


def test_export_is_bit_equal_and_loads(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from prl_models.hf import export_hf
    from prl_trainer_fsdp.parallel import gather

    trainer = Trainer(run_config(model), tmp_path / "run", CPU)
    advance(trainer, 1, 2)
    out = export_hf(trainer.learner.model.disk_tensors(gather), model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.float32
    assert_same_bits(state(trainer), {name: parameter.detach() for name, parameter in loaded.named_parameters()})
    with pytest.raises(StoreError, match="is not empty"):
        export_hf({}, model, out)
