"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_losses.config import CeConfig, DppoConfig

DPPO = Contribution(
    factory="prl_losses.dppo:build",
    config=DppoConfig,
    summary="policy gradient with a trust region on probability differences; the default",
)
CE = Contribution(factory="prl_losses.ce:build", config=CeConfig, summary="cross entropy, for supervised training")
