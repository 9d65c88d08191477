"""What this package contributes. It is imported to validate a configuration, so it does not import torch."""

from __future__ import annotations

from acme_reinforce.config import ReinforceConfig
from prl.contribution import Contribution

REINFORCE_TIS = Contribution(
    factory="acme_reinforce.loss:Reinforce",
    config=ReinforceConfig,
    summary="REINFORCE with truncated importance sampling",
)
