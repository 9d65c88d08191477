"""Which code runs a model, why, and what the own families refuse by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from prl.contribution import Contribution
from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.blocks.decoder import Decoder
from prl_models.family import DecoderSpec
from prl_models.hf import HfModel
from prl_models.llama import Llama
from prl_models.options import Kernels, ModelOptions
from prl_models.provider import choose, load_model
from prl_models.qwen3 import Qwen3

TINY = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def config(kind: str, **keys: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**TINY, **keys})


def save(folder: Path, kind: str, **keys: Any) -> str:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(kind, **keys)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "qwen2"])
def test_auto_takes_the_own_family(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, kind)
    with caplog.at_level(logging.INFO, "prl_models.provider"):
        model = load_model(path, "auto", ModelOptions())
    assert isinstance(model, Decoder)
    assert caplog.messages == [f"model: own {kind} implementation, because model_type is '{kind}'"]


def test_hf_where_it_is_asked_for_or_no_plugin_knows_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, "gemma", head_dim=8)
    assert choose(path, "hf") == ("hf", 'model.impl = "hf"')
    with caplog.at_level(logging.INFO, "prl_models.provider"):
        assert isinstance(load_model(path, "auto", ModelOptions()), HfModel)
    assert caplog.messages == ["model: transformers' own code, because no plugin knows 'gemma'"]
    with pytest.raises(ConfigError, match="no plugin knows 'gemma'"):
        load_model(path, "custom", ModelOptions())


def test_what_a_family_refuses_goes_to_hf_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path, "llama", hidden_act="gelu")
    with caplog.at_level(logging.INFO, "prl_models.provider"):
        assert isinstance(load_model(path, "auto", ModelOptions()), HfModel)
    assert caplog.messages == [
        "model: transformers' own code, because the llama implementation refuses the model: model type 'llama' with "
        "hidden_act = 'gelu' is not implemented: it has 'silu'"
    ]
    with pytest.raises(EnvironmentNotFit, match="hidden_act = 'gelu' is not implemented"):
        load_model(path, "custom", ModelOptions())


def test_a_plugin_that_cannot_be_used_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prl import registry

    path = save(tmp_path, "llama")
    with registry.override("models", "llama", Contribution("prl_models.llama:build", api_version=0)):
        name, reason = choose(path, "auto")
        assert name == "hf" and reason.startswith("the plugin for 'llama' cannot be used: ")
        with pytest.raises(ConfigError, match="the plugin for 'llama' cannot be used"):
            choose(path, "custom")


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2 is not implemented: it has 1 or None"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "0.5",
        ),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("qwen2", {"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layers chunked_attention"),
        ("mistral", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("mistral", {"layer_types": ["full_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_refused_by_name(kind: str, keys: dict[str, Any], reason: str) -> None:
    family = Qwen3() if kind == "qwen3" else Llama()
    with pytest.raises(EnvironmentNotFit, match=f"model type '{kind}' with .*is not implemented") as caught:
        family.spec(config(kind, **keys))
    assert reason in str(caught.value)


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_biases_that_transformers_does_not_look_at(kind: str, tmp_path: Path) -> None:
    path = save(tmp_path, kind, attention_bias=True, mlp_bias=True)
    assert isinstance(load_model(path, "custom", ModelOptions()), Decoder)


def test_operations_by_name_are_taken_or_refused_whatever_code_there_is(tmp_path: Path) -> None:
    own = ModelOptions(kernels=Kernels(operations="triton"))
    with pytest.raises(EnvironmentNotFit, match='operations = "triton" needs a GPU, and the device is cpu'):
        load_model(save(tmp_path / "llama", "llama"), "auto", own)
    with pytest.raises(ConfigError, match='operations = "triton", but this model runs by transformers'):
        load_model(save(tmp_path / "gelu", "llama", hidden_act="gelu"), "auto", own)


def test_longrope_is_refused() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(
        EnvironmentNotFit, match="'longrope' is not implemented: there are default, linear, yarn, llama3"
    ):
        Llama().spec(config("llama", rope_parameters=rope))


def test_a_spec_says_what_differs_between_layers() -> None:
    spec: DecoderSpec = Qwen3().spec(
        config("qwen3", head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    )
    assert [layer.attention.window for layer in spec.layers] == [None, 5]
    assert {layer.attention.qk_norm for layer in spec.layers} == {"head"}
    assert Llama().spec(config("qwen2")).layers[0].attention.qkv_bias
    assert not Llama().spec(config("qwen2")).layers[0].attention.out_bias
    assert Llama().spec(config("mistral", sliding_window=4)).layers[1].attention.window == 4
    assert len(spec.rope.frequencies) == 4


def test_layers_that_are_recomputed_are_handed_one_stream(tmp_path: Path) -> None:
    """Their inputs are all that is kept of them."""
    import numpy as np

    from prl_models.batch import PackedBatch

    model: Any = load_model(save(tmp_path, "llama"), "custom", ModelOptions())
    got: list[bool] = []
    model.blocks[1].register_forward_pre_hook(lambda module, inputs: got.append(inputs[1] is None))
    ids, bounds = np.arange(6, dtype=np.int32), np.array([0, 6], np.int32)
    batch = PackedBatch.build(ids, bounds, np.arange(1, 6), np.ones(5, np.float32), torch.device("cpu"))
    with torch.no_grad():
        apart = model(batch)[0]
        for block in model.blocks:
            block.recomputed = True
        together = model(batch)[0]
    assert got == [False, True] and torch.equal(apart, together)
