"""Adapters in the trainer: what is trained, saved and published, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from prl.errors import ConfigError, Preempted
from prl.testing.numerics import assert_parity, assert_same_bits
from prl_models.hf import export_hf
from prl_trainer_fsdp.sft.run import SftRun, main
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, state, trained
from .sft_helpers import metrics, save_all, write_config

LORA = {"rank": 4, "alpha": 8.0}
SEQUENCES = [[3, 9, 27, 20, 60, 58], [5, 5, 8, 13, 21]]


def configured(model: Path, impl: str = "auto", **trainer: Any) -> Any:
    return run_config(model, **{"impl": impl, "lora": LORA, **trainer})


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.learner.model.named_parameters()}


def names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def scores(trainer: Trainer) -> list[float]:
    """Of every token but the first of each sequence."""
    return [value for sequence in trainer.learner.score(SEQUENCES) for value in sequence[1:]]


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_merged_equals_applied_before_and_after_training(model: Path, tmp_path: Path, impl: str) -> None:
    plain = Trainer(configured(model, impl, lora=None), tmp_path / "plain", CPU)
    names = [name for name, _ in plain.learner.disk_tensors()]
    trainer = Trainer(configured(model, impl), tmp_path, CPU)
    assert scores(trainer) == pytest.approx(scores(plain), abs=2e-6)
    before = whole(trainer)
    for step in (1, 2, 3):
        trainer.train(batches(samples(step, step - 1), step)[0])
    after = whole(trainer)
    for name, value in after.items():
        assert torch.equal(value, before[name]) != (".lora_" in name), name
    folder = export_hf(trainer.learner.disk_tensors(), model, tmp_path / "merged")
    again = Trainer(configured(folder, impl, lora=None), tmp_path / "again", CPU)
    assert scores(trainer) == pytest.approx(scores(again), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(scores(trainer), scores(plain), strict=True)) > 0.1
    assert [name for name, _ in trainer.learner.disk_tensors()] == names


def test_own_code_and_transformers_train_the_same_adapters(model: Path, tmp_path: Path) -> None:
    own, hf = (trained(configured(model, impl), tmp_path / impl, 1) for impl in ("auto", "hf"))
    assert type(own.learner.model) is not type(hf.learner.model)
    expected = dict(hf.learner.parameters())
    assert expected.keys() == dict(own.learner.parameters()).keys()
    for name, value in own.learner.parameters():
        assert_parity(expected[name], value, 5e-4, name)  # AdamW's first step is the gradient's sign, nearly


def test_adapters_alone_are_saved_and_resumed(model: Path, tmp_path: Path) -> None:
    config = configured(model)
    trainer = trained(config, tmp_path / "a")
    trainer.snapshot(2)
    trainer.checkpoint(2, tmp_path / "saved")
    kept = [key for file in sorted((tmp_path / "saved").rglob("*.safetensors")) for key in names_in(file)]
    assert len(kept) > 2 * 7 * 2 and all(key.endswith((".lora_A", ".lora_B")) for key in kept), kept
    again = Trainer(config, tmp_path / "b", CPU)
    again.load_checkpoint(tmp_path / "saved")
    for one in (trainer, again):
        one.train(batches(samples(3, 2), 3)[0])
    assert_same_bits(state(trainer), state(again))


def test_first_values_depend_on_names_alone(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = state(Trainer(configured(model), tmp_path / "a", CPU))
    torch.manual_seed(2)
    two = state(
        Trainer(configured(model, "hf", lora={**LORA, "targets": ["q_proj", "down_proj"]}), tmp_path / "b", CPU)
    )
    assert len(two) == 2 * 2 * 2
    assert_same_bits({name: one[name] for name in two}, two)
    assert all((value == 0).all() == name.endswith("lora_B") for name, value in one.items())


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_bfloat16_keeps_the_frozen_model_in_bfloat16(model: Path, tmp_path: Path, group: None, impl: str) -> None:
    exact = trained(configured(model, impl), tmp_path / "exact")
    trainer = trained(configured(model, impl, dtype="bfloat16"), tmp_path / "half")
    for name, parameter in trainer.learner.model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    assert {tensor.dtype for _, tensor in trainer.learner.disk_tensors()} == {torch.bfloat16}
    assert scores(trainer) == pytest.approx(scores(exact), abs=0.5)


def test_the_frozen_head_gets_no_gradient(model: Path, tmp_path: Path) -> None:
    trainer = Trainer(configured(model), tmp_path, CPU)
    seen: list[str] = []
    trainer.learner.optimizer.zero_grad = lambda: seen.extend(  # type: ignore[method-assign]
        name for name, p in trainer.learner.model.named_parameters() if p.grad is not None
    )
    trainer.train(batches(samples(1), 1)[0])
    assert seen and all(".lora_" in name for name in seen)


@pytest.mark.parametrize("impl", ["auto", "hf"])
@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"targets": ["query"]}, r"names 'query', but .* are down_proj, gate_proj, k_proj"),
        ({"targets": ["q_proj", "lm_head"]}, "names 'lm_head'"),
        ({"targets": []}, "names nothing"),
        ({"rank": 17}, r"rank = 17 is more than .*k_proj has rows or columns, which is 16 x 32: .* at most 16"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path, tmp_path: Path, impl: str, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(configured(model, impl, lora={**LORA, **lora}), tmp_path, CPU)


def test_a_supervised_run_with_adapters(tmp_path: Path) -> None:
    """From a run directory to a folder that transformers loads as a plain model, stopped and resumed on the way."""
    from transformers import AutoModelForCausalLM

    folder = save_all(tmp_path / "model")
    keys: dict[str, Any] = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}, "lr": 3e-2}
    run = write_config(folder, tmp_path / "run", trainer=keys, steps=8)
    assert main(str(run.path)) == 0
    losses = [line["train/loss"] for line in metrics(run) if "train/loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.path / "model").state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "v_proj", "down_proj"}
    parts = write_config(folder, tmp_path / "parts", trainer=keys, steps=8)
    half = SftRun(parts)
    for step in (1, 2, 3):
        half._one_step(step)
    half.stop()
    with pytest.raises(Preempted):
        half.run()
    half.close("stopped", None)
    assert main(str(parts.path)) == 0
    weights = "model/model.safetensors"
    assert (parts.path / weights).read_bytes() == (run.path / weights).read_bytes()
