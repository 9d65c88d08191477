"""Settings of the launchers."""

from __future__ import annotations

from pydantic import Field

from prl.contribution import PluginConfig


class LocalConfig(PluginConfig):
    grace_s: float = Field(60, ge=0)
    """Seconds the controller has for its last checkpoint and for stopping the other roles, before it is killed."""
    role_grace_s: float = Field(10, ge=0)
    """Seconds each other role has between SIGTERM and SIGKILL."""
    backoff_s: float = Field(0.5, ge=0)
    """Pause before a role is started again; it doubles each time, up to 30 seconds."""
    healthy_after_s: float = Field(600, gt=0)
    """A role that has run for so long gets its whole restart budget back."""
