"""Low-rank adapters, and whether they reach the engines as such or merged into whole weights.

Trainer and engine both ask here, so that they cannot disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


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
