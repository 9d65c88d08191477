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
