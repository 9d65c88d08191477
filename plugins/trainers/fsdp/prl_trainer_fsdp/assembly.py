"""From a configuration to a model that is ready to train. The order matters:

structure (with adapters) -> compilation -> recomputation -> offloading -> sharding -> values.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from prl.config.schema import ModelTable
from prl.errors import ConfigError
from prl_models.blocks.lora import Lora
from prl_models.options import Kernels, ModelOptions
from prl_models.provider import load_model
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.memory import treat_blocks
from prl_trainer_fsdp.parallel.runtime import Runtime
from prl_trainer_fsdp.parallel.sharding import scatter_like, shard

log = logging.getLogger(__name__)


def assemble(table: ModelTable, config: FsdpConfig, runtime: Runtime) -> Any:
    """A `PackedModel`, sharded over the runtime's ranks.

    Raises:
        ConfigError, EnvironmentNotFit: the model cannot be loaded, or not with this configuration.
    """
    if runtime.layout.ep > 1:
        raise ConfigError(
            [f"trainer.ep = {runtime.layout.ep}, but no model divides its experts among ranks: use ep = 1"]
        )
    model: Any = load_model(table.path, table.impl, options(table, config, runtime))
    treat_blocks(model, config, runtime.device)
    shard(model, runtime, table.dtype)
    model.fill(scatter_like)
    return model


def skeleton_options(table: ModelTable, config: FsdpConfig) -> ModelOptions:
    """Of a model without values: names, shapes and what is trained."""
    lora = config.lora
    return ModelOptions(
        device=torch.device("meta"),
        dtype=getattr(torch, table.dtype),
        lora=None if lora is None else Lora(lora.rank, lora.alpha, lora.targets),
        deferred=True,
    )


def options(table: ModelTable, config: FsdpConfig, runtime: Runtime) -> ModelOptions:
    kernels = Kernels() if config.kernels == "auto" else Kernels(**config.kernels.model_dump())
    lora = config.lora
    return ModelOptions(
        device=runtime.device,
        dtype=getattr(torch, table.dtype),
        kernels=kernels,
        context=runtime.context,
        lora=None if lora is None else Lora(lora.rank, lora.alpha, lora.targets),
        deferred=runtime.world > 1,
    )
