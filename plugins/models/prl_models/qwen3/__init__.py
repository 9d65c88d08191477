"""Qwen3 (arXiv 2505.09388): a Llama whose queries and keys are normed head by head."""

from __future__ import annotations

from typing import Any

from prl.contribution import PluginConfig
from prl_models.family import AttentionSpec, DecoderSpec, dense_decoder, layer_windows, require
from prl_models.family_provider import FamilyProvider


class Qwen3:
    name = "qwen3"
    rules = ()

    def spec(self, config: Any) -> DecoderSpec:
        require(config, hidden_act=("silu",))
        layers = [
            AttentionSpec(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                qk_norm="head",
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                window=window,
            )
            for window in layer_windows(config)
        ]
        return dense_decoder(config, layers)


def build(config: PluginConfig) -> FamilyProvider:
    return FamilyProvider(Qwen3())
