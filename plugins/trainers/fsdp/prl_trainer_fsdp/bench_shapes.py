"""Models of known shapes with random weights, as folders: a benchmark needs no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prl.errors import ConfigError


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
}
"""As in the models' own config.json."""


def shapes_of(shapes: str | Mapping[str, Any]) -> dict[str, Any]:
    """Raises: ConfigError: the name is not known, or the table has no `model_type`."""
    if isinstance(shapes, str):
        if shapes not in SHAPES:
            raise ConfigError([f"bench.shapes: {shapes!r} is not known: {', '.join(SHAPES)}, or a table of your own"])
        return dict(SHAPES[shapes])
    if "model_type" not in shapes:
        raise ConfigError(['bench.shapes: a table needs model_type, such as model_type = "qwen3"'])
    return dict(shapes)


def write_model(shapes: str | Mapping[str, Any], folder: Path, device: torch.device, seed: int) -> None:
    """A Hugging Face folder of normally distributed weights (0.02; norms 1), made on `device` in bfloat16.

    Raises:
        ConfigError: transformers does not make a model of these shapes.
    """
    known = shapes_of(shapes)
    try:
        config = AutoConfig.for_model(known.pop("model_type"), **known)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError([f"bench.shapes: transformers makes no model of {dict(known)}: {error}"]) from error
    model = model.to_empty(device=device)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
