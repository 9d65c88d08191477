"""Models of known shapes with random weights, as folders: a benchmark needs no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prl.errors import ConfigError
from prl_trainer_fsdp.bench.named import SHAPES


def shapes_of(shapes: str | Mapping[str, Any]) -> dict[str, Any]:
    """Raises: ConfigError: the name is not known, or the table has no `model_type`."""
    if isinstance(shapes, str):
        if shapes not in SHAPES:
            raise ConfigError([f"bench.shapes: {shapes!r} is not known: {', '.join(SHAPES)}, or a table of your own"])
        return dict(SHAPES[shapes])
    if "model_type" not in shapes:
        raise ConfigError(['bench.shapes: a table needs model_type, such as model_type = "qwen3"'])
    return dict(shapes)


def write_model(
    shapes: str | Mapping[str, Any], folder: Path, device: torch.device, seed: int, std: float = 0.02
) -> None:
    """A Hugging Face folder of normally distributed weights (norms 1), made on `device` in bfloat16.

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
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
