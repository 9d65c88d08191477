"""Learning-rate schedules, AdamW, and clipping by the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def adamw(config: FsdpConfig, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) whose decay leaves vectors alone.

    One fused pass over all parameters; over shards on CPU, which the fused kernel does not take, one per operation.
    """
    trained = [parameter for _, parameter in parameters if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        if group
    ]
    fused = not any(isinstance(p, DTensor) and p.device.type == "cpu" for p in trained)
    kind = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **kind)


def clip(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit` (0 never scales); returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if limit > 0:
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch._foreach_mul_(local, scale)
    return norm
