"""Settings of the losses."""

from __future__ import annotations

from pydantic import Field

from prl.contribution import PluginConfig


class DppoConfig(PluginConfig):
    delta_low: float = Field(0.2, gt=0, le=1)
    """A token with advantage <= 0 is dropped once its probability has fallen by more than this."""
    delta_high: float = Field(0.2, gt=0, le=1)
    """A token with advantage > 0 is dropped once its probability has risen by more than this."""
    adv_tau: float = Field(1.0, gt=0)
    """Factor on every advantage."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log-ratio that keeps trainer and sampler together."""


class CeConfig(PluginConfig):
    pass
