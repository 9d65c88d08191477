"""The keys of the loss's table. `prl config explain` prints the docstrings."""

from __future__ import annotations

from pydantic import Field

from prl.contribution import PluginConfig


class ReinforceConfig(PluginConfig):
    max_weight: float = Field(2.0, ge=1)
    """Importance weights are cut off here: more keeps more of the gradient of stale tokens, with more variance."""
