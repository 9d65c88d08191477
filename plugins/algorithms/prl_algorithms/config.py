"""Settings of the algorithms."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prl.contribution import PluginConfig


class LengthPenalty(PluginConfig):
    """Weights of what a rollout used, each measured against the most that any member of its group used."""

    output: float = Field(0.1, ge=0)
    """Sampled tokens."""
    input: float = Field(0.1, ge=0)
    """Tokens it was given: prompts, tool results, other agents' words."""
    turns: float = Field(0.1, ge=0)
    """Turns."""


class GrpoConfig(PluginConfig):
    min_members: ClassVar[int] = 2
    """A reward is compared with others of its group; checked against loop.group_size before a run starts."""

    normalize_std: bool = False
    """Divide by the group's standard deviation. Off: it weighs groups that are nearly always or nearly never right
    most (Dr. GRPO, arXiv 2503.20783, section 3)."""
    length_penalty: LengthPenalty | None = None
    """Take a share of the group's mean reward from long rollouts. It fades where the group fails, so that short
    answers never come before right ones."""
