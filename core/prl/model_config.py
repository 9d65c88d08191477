"""What the config.json of a model in a local folder says, for those who load no model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def text_config(path: str) -> dict[str, Any]:
    """The numbers of the language model, also where they are a part of a larger one's; {} for a model that is only
    named, or whose file cannot be read: whoever loads it says why."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {**config, **(config.get("text_config") or {})} if isinstance(config, dict) else {}


def vocab_size(path: str) -> int:
    """0 where it is not known."""
    found = text_config(path).get("vocab_size")
    return found if isinstance(found, int) else 0


def model_context(path: str) -> int:
    """How many positions the model was made for; 0 where that is not known, or where its rotary embedding is scaled,
    which may mean more of them."""
    found = text_config(path)
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type") or "default") if isinstance(rope, dict) else "unknown"
    longest = found.get("max_position_embeddings")
    return longest if isinstance(longest, int) and kind == "default" else 0
