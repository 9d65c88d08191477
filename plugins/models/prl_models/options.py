"""How a model is built: precision, device, kernels, and the ranks that share a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from prl.errors import EnvironmentNotFit

if TYPE_CHECKING:
    from prl_models.blocks.context import ContextParallel
    from prl_models.blocks.lora import Lora


AttentionName = Literal["auto", "flash4", "flash2", "cudnn", "flex", "varlen", "padded"]
OperationsName = Literal["auto", "triton", "liger", "quack", "torch"]


@dataclass(frozen=True)
class Kernels:
    """What computes attention and the operations between matrix products; "auto" lets `prl_models.kernels` choose."""

    attention: AttentionName = "auto"
    operations: OperationsName = "auto"


class KernelUnfit(EnvironmentNotFit):
    """A kernel that is asked for by name cannot be used. Other code for the model would not be what was asked for."""


@dataclass(frozen=True)
class ModelOptions:
    """
    Args:
        device: where parameters will be.
        dtype: precision of forward and backward; parameters are float32. A model whose `casts` is true converts its
            weights where it uses them; another one relies on FSDP's copies.
        kernels: asked for; a model reports what it took in `PackedModel.kernels`.
        context: the ranks that share every row; None: each row is computed by one rank.
        lora: adapters to add; the model's own weights are then frozen.
        deferred: leave parameters on `meta` until `PackedModel.fill`, so that no rank ever holds the whole model. A
            model that cannot be built that way is loaded at once.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    kernels: Kernels = Kernels()
    context: ContextParallel | None = None
    lora: Lora | None = None
    deferred: bool = False
