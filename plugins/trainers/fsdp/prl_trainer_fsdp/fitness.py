"""Whether a model can be trained with these settings, by what the files of its folder say; no torch.

The run refuses the same when it builds the model, minutes later and in another process. What the files do not say (a
model that is only named, layers whose names on disk are not those in memory) is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl import registry
from prl.errors import PluginError
from prl.model_config import text_config
from prl_models.sharing import misfit

if TYPE_CHECKING:
    from prl_trainer_fsdp.config import FsdpConfig, LoraTable

LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header, as the format's own library limits it."""


def model_problems(config: FsdpConfig, path: str, impl: str) -> Iterator[tuple[str, str]]:
    """Pairs of a key of `[trainer]` and what is wrong with it."""
    if config.ep > 1:
        yield "ep", f"is {config.ep}, but no model divides its experts among ranks: use ep = 1"
    model = text_config(path)
    if not model:
        return
    family = _own_family(str(model.get("model_type", "")), impl)
    if config.compile and family:
        yield (
            "compile",
            f"is true, but prl's own implementation of {family!r} has its operations fused already, with their "
            'gradients: leave compile out, or take transformers\' own code with model.impl = "hf"',
        )
    if not family and config.kernels != "auto" and config.kernels.operations != "auto":
        yield (
            "kernels.operations",
            f'is "{config.kernels.operations}", but this model runs by transformers\' own code, which has operations '
            'of its own: leave it at "auto"',
        )
    found = _heads(config, model)
    if found is not None:
        yield found
    if config.lora is not None and family:
        yield from _lora(config.lora, _layers(Path(path).expanduser()))


def _own_family(kind: str, impl: str) -> str:
    """The model plugin that takes models of this type; "" for transformers' own code."""
    if impl == "hf" or not kind:
        return ""
    try:
        registry.describe("models", kind)
    except PluginError:
        return ""
    return kind


def _heads(config: FsdpConfig, model: dict[str, Any]) -> tuple[str, str] | None:
    heads = model.get("num_attention_heads")
    if not isinstance(heads, int):
        return None
    kinds = model.get("layer_types")
    slides = model.get("use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    window = model.get("sliding_window") if slides else None
    return misfit(heads, model.get("num_key_value_heads") or heads, config.cp, config.cp_style, window)


def _layers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Last name to shape of the matrices in the repeated layers, from the headers of the weights; of several of one
    name the smallest."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(file).items():
            parts = name.split(".")
            shape = tuple(entry.get("shape", ())) if isinstance(entry, dict) else ()
            if len(shape) == 2 and parts[-1] == "weight" and any(part.isdigit() for part in parts):
                found[parts[-2]] = min(found.get(parts[-2], shape), shape, key=min)
    return found


def _header(file: Path) -> dict[str, Any]:
    """{} where it cannot be read: who loads the model says why."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size <= LONGEST_HEADER else {}
    except (OSError, ValueError):
        return {}
    return header if isinstance(header, dict) else {}


def _lora(lora: LoraTable, layers: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    if not layers:
        return
    missing = [name for name in lora.targets if name not in layers]
    if missing:
        yield (
            "lora.targets",
            f"names {', '.join(map(repr, missing))}, but the linear layers of this model's blocks are "
            f"{', '.join(sorted(layers))}",
        )
    chosen = {name: shape for name, shape in layers.items() if name in lora.targets}
    name, shape = min(chosen.items(), key=lambda item: min(item[1]), default=("", (lora.rank,)))
    if lora.rank > min(shape):
        yield (
            "lora.rank",
            f"is {lora.rank}, more than {name} has rows or columns, which is {' x '.join(map(str, shape))}: a rank of "
            f"at most {min(shape)} fits",
        )
