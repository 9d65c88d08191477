"""AdamW, SGD and Muon over shards.

optimizer   the optimiser and its state by parameter name; clipping
muon        whole matrices, whatever the sharding
offload     the state in the host's memory
schedules   the learning rate
"""

from __future__ import annotations

from prl_trainer_fsdp.optim.optimizer import Optimizer, clip

__all__ = ["Optimizer", "clip"]
