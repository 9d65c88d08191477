"""Weight files: compared by their headers before memory is taken, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prl.errors import ConfigError, EnvironmentNotFit
from prl.testing.numerics import assert_same_bits
from prl_models.options import ModelOptions
from prl_models.provider import load_model
from prl_models.weights import INDEX, SINGLE, WeightFiles

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def rewritten(saved: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """A copy of the model whose tensors were changed."""

    def rewrite(change: Callable[[Tensors], None]) -> Path:
        tensors = load_file(saved / SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / SINGLE)
        (tmp_path / "config.json").write_text((saved / "config.json").read_text())
        return tmp_path

    return rewrite


def load(folder: Path, **options: Any) -> Any:
    return load_model(str(folder), "custom", ModelOptions(**options))


def whole(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device)


def test_every_problem_is_named_before_memory_is_taken(
    rewritten: Callable[[Callable[[Tensors], None]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.embed_tokens.weight"] = torch.zeros(30, 16)
        tensors["model.norm.weight"] = torch.zeros(16, dtype=torch.int8)

    monkeypatch.setattr(WeightFiles, "reading", lambda self: pytest.fail("weights were read"))
    with pytest.raises(ConfigError) as caught:
        load(rewritten(change))
    said = caught.value.problems
    assert len(said) == 4
    assert "1 tensors are missing: model.layers.0.mlp.up_proj.weight" in said[0]
    assert "1 tensors are not part of the model" in said[1] and "layers.1.mlp.up_proj" in said[1]
    assert "'model.embed_tokens.weight' has shape [30, 16]" in said[2] and "asks for [31, 16]" in said[2]
    assert "'model.norm.weight' holds I8" in said[3]


def test_other_layers_than_the_config_describes(rewritten: Callable[[Callable[[Tensors], None]], Path]) -> None:
    folder = rewritten(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="9 tensors are missing: model.layers.1.* and 5 more"):
        load(folder)


def test_frequencies_of_older_files_are_made_anew(rewritten: Callable[[Callable[[Tensors], None]], Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    assert "inv_freq" not in "".join(dict(load(rewritten(change)).disk_tensors(lambda tensor: tensor)))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_on_disk_must_be_the_embedding(
    rewritten: Callable[[Callable[[Tensors], None]], Path], same: bool
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][0, 0] += 0.0 if same else 1.0

    folder = rewritten(change)
    if same:
        assert "lm_head.weight" not in dict(load(folder).disk_tensors(lambda tensor: tensor))
        return
    with pytest.raises(EnvironmentNotFit, match="'lm_head.weight' and 'model.embed_tokens.weight' differ"):
        load(folder)


def test_half_precision_becomes_float32(rewritten: Callable[[Callable[[Tensors], None]], Path], saved: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    found = dict(load(rewritten(change)).disk_tensors(lambda tensor: tensor))
    assert_same_bits({name: t.bfloat16().float() for name, t in load_file(saved / SINGLE).items()}, found)


def test_shards_with_an_index(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / SINGLE)
    names = sorted(tensors)
    where = {name: f"model-{1 + (i % 2):05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    assert_same_bits(tensors, dict(load(tmp_path).disk_tensors(lambda tensor: tensor)))
    (tmp_path / where[names[0]]).unlink()
    with pytest.raises(ConfigError, match="weights cannot be read: .*model-00001"):
        load(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64], ids=["empty", "garbage"])
def test_a_damaged_file(rewritten: Callable[[Callable[[Tensors], None]], Path], damage: bytes) -> None:
    folder = rewritten(lambda tensors: None)
    (folder / SINGLE).write_bytes(damage)
    with pytest.raises(ConfigError, match="weights cannot be read"):
        load(folder)


def test_a_deferred_model_has_no_values_until_it_is_filled(saved: Path) -> None:
    model = load(saved, deferred=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    placed: list[tuple[torch.Size, torch.dtype]] = []

    def place(tensor: Tensor, like: Tensor) -> Tensor:
        assert tensor.shape == like.shape and not like.is_meta
        placed.append((tensor.shape, tensor.dtype))
        return tensor

    model.fill(place)
    assert len(placed) == len(list(model.parameters())) and {kind for _, kind in placed} == {torch.float32}
    assert_same_bits(load_file(saved / SINGLE), dict(model.disk_tensors(lambda tensor: tensor)))
    assert torch.equal(model.model.rotary_emb.frequencies, load(saved).model.rotary_emb.frequencies)
    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)
    model.fill(whole)
    assert model.model.norm.weight[0] == 7.0, "a model that has values keeps them"


def test_a_name_on_the_hub_is_downloaded_without_other_formats(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    files = WeightFiles.find("someone/model")
    assert set(files.where) == set(load_file(saved / SINGLE))
    assert asked == {"someone/model": ["config.json", "*.safetensors", INDEX]}

    def offline(name: str, allow_patterns: list[str]) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("not in the cache, and there is no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match="'someone/model' cannot be downloaded: .*no connection"):
        WeightFiles.find("someone/model")


def test_other_formats_are_not_for_the_own_code(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(EnvironmentNotFit, match=r"has no model\.safetensors"):
        load(tmp_path)
