"""What a step keeps in memory: recomputation instead of activations, and the host's memory instead of the device's."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module) -> None:
    """Keep only the block's inputs and compute it again in the backward pass. Its forward is replaced rather than the
    block wrapped, so that parameters keep their names; call it before `shard`, whose hooks stay outside."""
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
