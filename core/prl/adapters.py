"""Low-rank adapters, and whether they reach the engines as such or merged into whole weights.

Trainer and engine both ask here, so that they cannot disagree. Their files and names are PEFT's: what `peft_config`
describes and `peft_name` calls its tensors is loaded by PEFT and by inference servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The files of a folder in PEFT's format."""
PEFT_PREFIX = "base_model.model."


class Adapter(msgspec.Struct, frozen=True):
    """Low-rank adapters: W x + (alpha / rank) B A x for every layer whose name ends in one of `targets`.

    Their tensors have PEFT's names, "base_model.model.<layer>.lora_A.weight" f[rank, in] and "...lora_B.weight"
    f[out, rank].
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


def trained(config: RunConfig) -> Adapter | None:
    """The adapters that the trainer trains; a trainer's schema says so, as `adapter`. None: the whole model."""
    adapter: Adapter | None = getattr(config.trainer.plugin_config(), "adapter", None)
    return adapter


def published(config: RunConfig) -> Adapter | None:
    """The adapters that engines receive in the place of whole weights.

    None: the whole model is trained, `engine.adapters` asks for merged weights, or the engine's schema does not say
    `takes_adapters`.
    """
    if config.engine.adapters == "merged" or not getattr(config.engine.plugin_config(), "takes_adapters", False):
        return None
    return trained(config)


def peft_name(name: str) -> str:
    """PEFT's name of a tensor: "model.layers.0.mlp.up_proj.lora_A" is a layer there, with a weight."""
    return f"{PEFT_PREFIX}{name}.weight"


def peft_config(adapter: Adapter, base: str = "") -> dict[str, Any]:
    """What adapter_config.json says of adapters over the model `base`, "" for one that whoever loads them knows."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
