"""How the blocks of a model are computed: compiled, recomputed in the backward pass, saved on the host. Each replaces a
block's forward rather than wrapping the block, so that parameters keep their names, and stays inside the hooks of
sharding, which come after it."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from prl.errors import ConfigError
from prl_models.blocks.cache import selective
from prl_models.blocks.context import keep_out_of_graphs
from prl_trainer_fsdp.activations import offload_activations
from prl_trainer_fsdp.config import FsdpConfig


def treat_blocks(model: Any, config: FsdpConfig, device: torch.device) -> None:
    """As the configuration says, in this order: what is recomputed is the compiled block, what travels to the host is
    what is left to keep.

    Raises:
        ConfigError: to be compiled is a model whose operations are fused by hand.
    """
    if config.compile and model.casts:
        raise ConfigError(
            [
                "trainer.compile = true, but this model's operations between matrix products are fused already, with "
                'their gradients: leave compile out, or take transformers\' own code with model.impl = "hf"'
            ]
        )
    blocks = list(model.blocks)
    for block in blocks:
        if config.compile:
            compile_block(block)
        if config.recompute != "none":
            recompute(block, config.recompute)
    if config.offload_activations:
        offload_activations(blocks, device)


def recompute(block: nn.Module, kind: Literal["selective", "full"]) -> None:
    """Keep the block's inputs, and with "selective" what its attention kernel returned, whose cost grows with the
    square of a document's length; compute all else again in the backward pass."""
    kept = selective if kind == "selective" else noop_context_fn
    block.recomputed = True
    block.forward = functools.partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=kept
    )


def compile_block(block: nn.Module) -> None:
    """One graph for rows of any length on each side of attention."""
    keep_out_of_graphs()
    block.forward = torch.compile(block.forward, dynamic=True)
