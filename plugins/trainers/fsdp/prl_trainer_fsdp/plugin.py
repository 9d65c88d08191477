"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_trainer_fsdp.config import FsdpConfig

FSDP = Contribution(
    config=FsdpConfig,
    factory="prl_trainer_fsdp.role:FsdpPlugin",
    summary="One CPU process, one GPU, or many of either sharded with FSDP2",
)
