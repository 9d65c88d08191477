"""Checkpoints continue to the bit, and damaged ones are refused with a reason."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from prl import faults
from prl.config.schema import ModelTable
from prl.errors import RunFailed, StoreError
from prl.faults import Fault
from prl.testing.numerics import assert_same_bits
from prl_trainer_fsdp.checkpoint import Reader, check, read_index
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.parallel.runtime import Runtime
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, save_model, state

SCHEDULE = {"schedule": "cosine", "decay_steps": 10, "warmup_steps": 2, "weight_decay": 0.1}
DATA, INDEX = "rank-00000.safetensors", "rank-00000.json"


def advance(trainer: Trainer, first: int, last: int) -> list[dict[str, float]]:
    """Metrics of steps `first` to `last`, without what a clock says."""
    found = [trainer.train(batches(samples(step, step - 1), step)[0]).metrics for step in range(first, last + 1)]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in found]


def saved_by(trainer: Trainer, step: int, path: Path) -> dict[str, str]:
    trainer.snapshot(step)
    return trainer.checkpoint(step, path)


def test_five_and_five_steps_are_ten(model: Path, tmp_path: Path) -> None:
    config = run_config(model, **SCHEDULE)
    whole = Trainer(config, tmp_path / "whole", CPU)
    expected = advance(whole, 1, 10)[5:]
    first = Trainer(config, tmp_path / "first", CPU)
    advance(first, 1, 5)
    files = saved_by(first, 5, tmp_path / "saved")
    second = Trainer(config, tmp_path / "second", CPU)
    second.load_checkpoint(tmp_path / "saved")
    assert second.version == 5
    assert second._probes == first._probes and any(probe.first < len(probe.token_ids) for probe in second._probes)
    assert advance(second, 6, 10) == expected
    assert_same_bits(state(whole), state(second))
    for name, digest in files.items():
        assert hashlib.sha256((tmp_path / "saved" / name).read_bytes()).hexdigest() == digest
    assert sorted(files) == [INDEX, DATA, "trainer.json"]


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_every_optimiser_continues(model: Path, tmp_path: Path, optimizer: str) -> None:
    config = run_config(model, optimizer=optimizer)
    whole = Trainer(config, tmp_path / "whole", CPU)
    advance(whole, 1, 2)
    saved_by(whole, 2, tmp_path / "saved")
    again = Trainer(config, tmp_path / "again", CPU)
    again.load_checkpoint(tmp_path / "saved")
    assert advance(whole, 3, 3) == advance(again, 3, 3)
    assert_same_bits(state(whole), state(again))
    other = Trainer(run_config(model), tmp_path / "other", CPU)
    with pytest.raises(StoreError, match="belongs to another optimiser: it lacks 'exp_avg") as refused:
        other.load_checkpoint(tmp_path / "saved")
    assert refused.value.exit_code == 2


def test_training_goes_on_while_a_slow_disk_takes_it(model: Path, tmp_path: Path) -> None:
    """What is written is the state of the snapshot, and the next step says how long the trainer stood still."""
    trainer = Trainer(run_config(model), tmp_path / "run", CPU)
    assert "time/checkpoint" not in trainer.train(batches(samples(1, 0), 1)[0]).metrics
    before = state(trainer)
    faults.install("trainer", plan=[Fault("trainer", "trainer.write", "delay", at=1, seconds=1.0)])
    try:
        trainer.snapshot(1)
        writer = threading.Thread(target=trainer.checkpoint, args=(1, tmp_path / "saved"))
        writer.start()
        metrics = trainer.train(batches(samples(2, 1), 2)[0]).metrics
        assert writer.is_alive() and not (tmp_path / "saved" / DATA).exists(), "the step has waited for the disk"
        assert 0 < metrics["time/checkpoint"] < 1.0
        started = time.monotonic()
        trainer.snapshot(2)  # the next waits: there is memory for one
        assert not writer.is_alive() or time.monotonic() - started > 0.01
        writer.join()
    finally:
        faults.install("trainer", plan=[])
    with Reader(read_index(tmp_path / "saved")) as reader:
        assert_same_bits(before, {name: reader.whole("parameter", name) for name in before})
    assert_different(before, state(trainer))


def assert_different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.gpu
def test_on_a_gpu_the_copy_is_page_locked_and_complete(model: Path, tmp_path: Path) -> None:
    runtime = Runtime(0, 1, torch.device("cuda", 0))
    trainer = Trainer(run_config(model, device="cuda"), tmp_path / "run", runtime)
    advance(trainer, 1, 2)
    before = {name: tensor.cpu() for name, tensor in state(trainer).items()}
    trainer.snapshot(2)
    assert trainer._saver._buffer.is_pinned()
    advance(trainer, 3, 3)
    trainer.checkpoint(2, tmp_path / "saved")
    with Reader(read_index(tmp_path / "saved")) as reader:
        assert_same_bits(before, {name: reader.whole("parameter", name) for name in before})
    again = Trainer(run_config(model, device="cuda"), tmp_path / "again", runtime)
    again.load_checkpoint(tmp_path / "saved")
    assert_same_bits(before, {name: tensor.cpu() for name, tensor in state(again).items()})
    trainer.snapshot(3)  # the same memory again


def test_only_what_was_taken_last_is_written(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(model), tmp_path / "run", CPU)
    advance(trainer, 1, 1)
    trainer.snapshot(1)
    with pytest.raises(RunFailed, match="step 2 cannot be written: the last snapshot is of 1"):
        trainer.checkpoint(2, tmp_path / "saved")


@pytest.fixture(scope="module")
def one_saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    trainer = Trainer(run_config(model), folder / "run", CPU)
    advance(trainer, 1, 1)
    saved_by(trainer, 1, folder / "saved")
    return folder / "saved"


@pytest.fixture
def saved(one_saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(one_saved, tmp_path / "saved"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (truncate, DATA, f"{DATA} is truncated: .* bytes instead of"),
        (flip, DATA, f"{DATA} was altered"),
        (Path.unlink, DATA, f"file .*{DATA} is missing"),
        (truncate, INDEX, f"{INDEX} is damaged"),
        (Path.unlink, INDEX, f"no whole checkpoint of a trainer: {INDEX} is missing"),
        (Path.unlink, "trainer.json", "no whole checkpoint of a trainer: trainer.json is missing"),
    ],
)
def test_a_damaged_file_is_refused_by_name(saved: Path, model: Path, tmp_path: Path, damage, name, said) -> None:  # type: ignore[no-untyped-def]
    damage(saved / name)
    trainer = Trainer(run_config(model), tmp_path / "again", CPU)
    before = state(trainer)
    with pytest.raises(StoreError, match=said):
        trainer.load_checkpoint(saved)
    assert_same_bits(before, state(trainer))


def test_slices_that_are_missing_are_noticed(saved: Path, model: Path) -> None:
    held = json.loads((saved / INDEX).read_bytes())
    held["tensors"]["parameter"]["model.norm.weight"]["pieces"] = []
    (saved / INDEX).write_text(json.dumps(held))
    with pytest.raises(StoreError, match=r"0 of the 32 elements of 'model\.norm\.weight'"):
        read_index(saved)


def test_another_models_checkpoint_is_refused_with_the_numbers_before_weights_are_read(
    saved: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "untied", tied=False)
    with pytest.raises(StoreError, match=r"another model: it lacks 'lm_head\.weight' \(1 such\)"):
        Trainer(run_config(other), tmp_path / "again", CPU).load_checkpoint(saved)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "intermediate_size": 64}))
    (other / "model.safetensors").unlink()  # it cannot have been read
    with pytest.raises(StoreError, match=r"'model\.layers\.0\.mlp\.gate_proj\.weight' is \[48, 32\] there, \[64, 32\]"):
        check(ModelTable(path=str(other), impl="hf"), FsdpConfig(), saved)


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    from safetensors import safe_open

    for file in saved.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        else:
            with safe_open(file, "pt") as tensors:
                assert "optimizer/exp_avg.model.norm.weight" in tensors.keys()  # noqa: SIM118 (not a mapping)


def test_a_full_disk_is_a_store_error(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(model), tmp_path / "again", CPU)
    (tmp_path / "file").write_text("")
    trainer.snapshot(0)
    with pytest.raises(StoreError, match="cannot be written"):
        trainer.checkpoint(0, tmp_path / "file" / "below")


def test_export_is_bit_equal_and_loads(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from prl_models.hf import export_hf
    from prl_trainer_fsdp.parallel.sharding import gather

    trainer = Trainer(run_config(model), tmp_path / "run", CPU)
    advance(trainer, 1, 2)
    out = export_hf(trainer.learner.model.disk_tensors(gather), model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.float32
    assert_same_bits(state(trainer), {name: parameter.detach() for name, parameter in loaded.named_parameters()})
    with pytest.raises(StoreError, match="is not empty"):
        export_hf({}, model, out)
