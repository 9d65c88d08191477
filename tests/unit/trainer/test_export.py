"""An exported checkpoint is a Hugging Face folder with exactly the trained weights; importing one gives them back."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prl import registry
from prl.errors import StoreError, UsageError
from prl.rundir import RunDir
from prl.testing.numerics import assert_same_bits
from prl_models import shards
from prl_models.hf import export as hf_export
from prl_trainer_fsdp.checkpoint import Reader, read_index
from prl_trainer_fsdp.checkpoint.export import stand_ins
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, save_model, state

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


def make_run(at: Path, model: Path, impl: str = "auto", **trainer: Any) -> tuple[RunDir, Trainer]:
    """A run directory as far as exporting reads it: configuration, one checkpoint of one step."""
    run = RunDir(at)
    config = run_config(model, impl=impl, **trainer)
    made = Trainer(config, run.path, CPU)
    made.train(batches(samples(1, 0), 1)[0])
    made.snapshot(1)
    made.checkpoint(1, run.checkpoint(1) / "trainer")
    run.config.write_text(config.model_dump_json())
    return run, made


@pytest.fixture
def run(model: Path, tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", model)[0]


def plugin(**own: Any) -> Any:
    return registry.build("trainers", "fsdp", own)


def trained(part: Path, kind: str = "parameter") -> dict[str, Tensor]:
    index = read_index(part)
    with Reader(index) as reader:
        return {name: reader.whole(kind, name) for name in index.of(kind)}


def loaded(folder: Path, dtype: str = "auto") -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("impl", ["custom", "hf"])
def test_the_folder_holds_the_trained_weights(model: Path, tmp_path: Path, impl: str) -> None:
    run, trainer = make_run(tmp_path / "run", model, impl)
    plugin().export(run, 1, tmp_path / "out")
    weights = trained(run.checkpoint(1) / "trainer")
    assert_same_bits(loaded(tmp_path / "out"), weights)
    assert_same_bits(weights, state(trainer))
    before = loaded(model)
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights.items())
    plugin().export(run, 1, tmp_path / "half", dtype="bfloat16")
    assert_same_bits(loaded(tmp_path / "half"), {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_shards_are_as_large_as_allowed(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_export, "SHARD_BYTES", 20_000)
    plugin().export(run, 1, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size - shards.ShardWriter.HEADER_BYTES <= 20_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = trained(run.checkpoint(1) / "trainer")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert_same_bits(loaded(tmp_path / "out"), weights)


def test_a_header_that_is_full_begins_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.ShardWriter, "HEADER_BYTES", 1024)
    tensors = {f"tensor.{index}": torch.full((2,), float(index)) for index in range(9)}
    hf_export._write_weights(tensors.items(), tmp_path)
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        found |= load_file(file)
    assert_same_bits(tensors, found)


def test_one_tensor_is_in_memory_at_a_time(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while files are as large as they may be."""
    returned: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    original = Reader.whole

    def counted(self: Reader, kind: str, name: str) -> Tensor:
        tensor = original(self, kind, name)
        alive.append(sum(reference() is not None for reference in returned))
        returned.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Reader, "whole", counted)
    plugin().export(run, 1, tmp_path / "out")
    assert len(alive) == 20 and max(alive) <= 1, alive


def test_a_model_without_memory_tells_its_tensors_apart() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        module[0].twin = module[0].weight
    names = stand_ins(module)
    assert module[0].weight is module[0].twin
    for name, tensor in module.state_dict().items():
        if name != "0.twin":
            assert names[tensor.data_ptr()] == name and not tensor.is_meta


def test_a_damaged_checkpoint_is_refused(run: RunDir, tmp_path: Path) -> None:
    file = run.checkpoint(1) / "trainer" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="was altered"):
        plugin().export(run, 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(run: RunDir, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", tied=False)
    run.config.write_text(run_config(other).model_dump_json())
    with pytest.raises(StoreError, match="another model"):
        plugin().export(run, 1, tmp_path / "out")


@pytest.mark.parametrize("impl", ["custom", "hf"])
def test_adapters_are_merged_or_written_alone(model: Path, tmp_path: Path, impl: str) -> None:
    """Merged as they are published; alone by PEFT's names, and back again."""
    run, trainer = make_run(tmp_path / "run", model, impl, lora=LORA)
    own = plugin(lora=LORA)
    own.export(run, 1, tmp_path / "merged")
    published = {name: tensor.clone() for name, tensor in trainer.learner.disk_tensors()}
    assert_same_bits(loaded(tmp_path / "merged"), published)
    own.export(run, 1, tmp_path / "adapter", adapter=True)
    from safetensors.torch import load_file

    alone = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(alone[key], state(trainer)["model.layers.1.mlp.down_proj.lora_B"])
    assert len(alone) == 12
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    own.import_weights(run, 1, str(tmp_path / "adapter"), tmp_path / "part")
    assert_same_bits(trained(tmp_path / "part"), state(trainer))
    with pytest.raises(UsageError, match=r"lora_alpha = 8\.0, the run has 16"):
        plugin(lora={**LORA, "alpha": 16.0}).import_weights(run, 1, str(tmp_path / "adapter"), tmp_path / "other")
    with pytest.raises(UsageError, match="The run trains adapters"):
        own.import_weights(run, 1, str(model), tmp_path / "other")


def test_adapters_of_a_run_without_any_are_refused(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no adapters"):
        plugin().export(run, 1, tmp_path / "out", adapter=True)


@pytest.mark.parametrize("impl", ["custom", "hf"])
def test_what_was_exported_is_imported_to_the_bit(model: Path, tmp_path: Path, impl: str) -> None:
    run, trainer = make_run(tmp_path / "run", model, impl)
    own = plugin()
    own.export(run, 1, tmp_path / "out")
    part = run.checkpoint(2) / "trainer"
    files = own.import_weights(run, 1, str(tmp_path / "out"), part)
    assert sorted(files) == sorted(file.name for file in part.iterdir())
    assert_same_bits(trained(part), state(trainer))
    own.export(run, 2, tmp_path / "again")
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    # A run goes on from it: the same step and version, an optimiser that has not begun.
    again = Trainer(trainer.config, tmp_path / "weights", CPU)
    again.load_checkpoint(part)
    assert (again.version, again.learner.steps) == (1, 1)
    assert all(not tensor.any() for name, tensor in again.learner.optimizer.named_state())
    again.train(batches(samples(2, 1), 2)[0])


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_is_no_model_of_the_run_is_refused_with_the_numbers(run: RunDir, model: Path, tmp_path: Path) -> None:
    own = plugin()
    short = Path(shutil.copytree(model, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))

    def shortened(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    with pytest.raises(
        UsageError, match=r"another model than the run's: .* here is no 'model\.layers\.1\..* \(9 such\)"
    ):
        own.import_weights(run, 1, str(rewritten(short, shortened)), tmp_path / "part")
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    rewritten(broken, lambda tensors: tensors.update({"model.norm.weight": torch.full((32,), float("nan"))}))
    with pytest.raises(UsageError, match=r"'model\.norm\.weight' has values there that are not finite"):
        own.import_weights(run, 1, str(broken), tmp_path / "part")


def test_experts_that_have_other_names_on_disk_make_the_round_trip(tmp_path: Path) -> None:
    """transformers fuses them in memory: [experts, ...] there, a tensor for each in the file."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    run, trainer = make_run(tmp_path / "run", tmp_path / "model", "hf")
    plugin().export(run, 1, tmp_path / "out")
    from safetensors.torch import load_file

    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "model" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert_same_bits(loaded(tmp_path / "out"), state(trainer))
    plugin().import_weights(run, 1, str(tmp_path / "out"), tmp_path / "part")
    assert_same_bits(trained(tmp_path / "part"), state(trainer))
