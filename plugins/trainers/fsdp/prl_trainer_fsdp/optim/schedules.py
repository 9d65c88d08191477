"""How the learning rate goes up and comes down."""

from __future__ import annotations

import math

from prl_trainer_fsdp.config import FsdpConfig


def learning_rate(config: FsdpConfig, step: int) -> float:
    """The rate of optimiser step `step`, counted from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    if config.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
