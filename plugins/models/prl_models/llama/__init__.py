"""Llama (arXiv 2302.13971) and what has its shape: SmolLM and others under its own model type, Mistral
(arXiv 2310.06825) with a sliding window, Qwen2 (arXiv 2407.10671) with biases before attention."""

from __future__ import annotations

from typing import Any

from prl.contribution import PluginConfig
from prl_models.family import AttentionSpec, DecoderSpec, dense_decoder, layer_windows, require
from prl_models.family_provider import FamilyProvider


class Llama:
    name = "llama"
    rules = ()

    def spec(self, config: Any) -> DecoderSpec:
        require(config, hidden_act=("silu",), pretraining_tp=(1, None))
        # Llama alone has keys for biases; transformers' code for the others does not look at them.
        biases = config.model_type == "llama"
        out_bias = biases and getattr(config, "attention_bias", False)
        layers = [
            AttentionSpec(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
                qkv_bias=out_bias or config.model_type == "qwen2",
                out_bias=out_bias,
                window=window,
            )
            for window in _windows(config)
        ]
        return dense_decoder(config, layers, mlp_bias=biases and getattr(config, "mlp_bias", False))


def _windows(config: Any) -> list[int | None]:
    if config.model_type == "mistral":
        require(config, layer_types=(None,))
        return [config.sliding_window] * config.num_hidden_layers
    if config.model_type == "qwen2":
        return layer_windows(config)
    return [None] * config.num_hidden_layers


def build(config: PluginConfig) -> FamilyProvider:
    return FamilyProvider(Llama())
