"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_algorithms.config import GrpoConfig

GRPO = Contribution(
    factory="prl_algorithms.grpo:build",
    config=GrpoConfig,
    summary="reward minus the mean of its group; optional length penalty; the default",
)
