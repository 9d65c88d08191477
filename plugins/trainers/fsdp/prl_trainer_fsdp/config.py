"""The trainer's own keys of `[trainer]`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from prl.adapters import Adapter
from prl.contribution import PluginConfig, wrong
from prl_trainer_fsdp.parallel.layout import Layout, make, misfit

if TYPE_CHECKING:
    from prl.config.data import SftDataTable

Attention = Literal["auto", "flash4", "flash2", "cudnn", "flex", "varlen", "padded"]
Operations = Literal["auto", "triton", "liger", "quack", "torch"]


class KernelsTable(PluginConfig):
    """What computes attention and the small operations between matrix products."""

    attention: Attention = "auto"
    """FlashAttention 4 or 2, cuDNN, FlexAttention, torch's varlen, or padded batches through torch's own attention."""
    operations: Operations = "auto"
    """Norms, rotary embeddings, gated activations, the head: our own Triton kernels, Liger's, quack's, or torch's."""


class LoraTable(PluginConfig):
    """Low-rank adapters: the model stays as it is, and two small matrices beside each chosen one are trained."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """What is added is B A x, times alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last parts of the names of the layers that get adapters."""


class FsdpConfig(PluginConfig):
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """"muon" orthogonalises the momentum of the layers' matrices and gives all else to AdamW."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate at its highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls after the warm-up: not at all, in a straight line, or along half a cosine."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which it rises in a straight line; the first already trains with lr / warmup_steps. With
    `updates_per_batch` a step of the run is as many optimiser steps."""
    decay_steps: int = Field(0, ge=0)
    """Optimiser step at which it has fallen to `min_lr_ratio`, counted from the start; needed unless constant."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """What remains of `lr` at the end of the schedule, as a share of it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging of gradients and of their squares."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the averaged squares."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's and SGD's averaging of gradients."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of matrices; vectors (norms, biases) never decay."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients with a larger norm are scaled down to it; 0 never scales."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes a GPU where there is one."""
    dp_replicate: int = Field(1, ge=1)
    """Copies of the sharded model, for many nodes: parameters travel within a copy, only gradients between them."""
    dp_shard: int = Field(0, ge=0)
    """Ranks that share one copy of parameters and optimiser and have samples of their own; 0: all that remain."""
    cp: int = Field(1, ge=1)
    """Context parallelism: ranks that share every row, for sequences too long for one."""
    cp_style: Literal["ulysses", "ring"] = "ulysses"
    """"ulysses" exchanges heads for tokens and needs cp to divide the heads; "ring" passes keys and values round."""
    ep: int = Field(1, ge=1)
    """Expert parallelism: ranks among which the experts of a layer are divided; inside dp_shard x cp."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: nothing; all of a layer but its attention; all."""
    offload_activations: bool = False
    """Keep what the backward pass needs of each layer in the host's memory."""
    offload_optimizer: bool = False
    """Keep the optimiser's state in the host's memory."""
    compile: bool = False
    """Compile each layer of a transformers model (impl = "hf") with torch.compile; prl's own families have fused
    operations instead."""
    kernels: Literal["auto"] | KernelsTable = "auto"
    """"auto" takes the fastest that is installed and works here, and says which and why."""
    lora: LoraTable | None = None
    """Train low-rank adapters instead of the whole model."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> FsdpConfig:
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule = "{self.schedule}" needs decay_steps (now {self.decay_steps}) above '
                f"warmup_steps ({self.warmup_steps}): usually the number of steps of the run"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise wrong("betas", f"both must be at least 0 and below 1, not {list(self.betas)}")
        return self

    @property
    def adapter(self) -> Adapter | None:
        """The adapters that are trained instead of the model; see `prl.adapters`."""
        return Adapter(self.lora.rank, self.lora.alpha, self.lora.targets) if self.lora else None

    def layout(self, world: int) -> Layout:
        """How so many ranks are laid out.

        Raises:
            ConfigError: the numbers do not fit; it names the nearest that do.
        """
        return make(world, self.dp_replicate, self.dp_shard, self.cp, self.ep)

    def problems(self, processes: int) -> Iterator[tuple[str, str]]:
        """What is wrong with so many processes: the key to change, and why. Asked before anything starts."""
        found = misfit(processes, self.dp_replicate, self.dp_shard, self.cp, self.ep)
        if found is not None:
            yield found

    def model_problems(self, path: str, impl: str) -> Iterator[tuple[str, str]]:
        """What is wrong with these settings for this model, as far as its folder's files say. Likewise."""
        from prl_trainer_fsdp.fitness import model_problems

        return model_problems(self, path, impl)

    def data_problems(self, data: SftDataTable) -> Iterator[tuple[str, str]]:
        """What is wrong with the examples of a supervised run, by their columns and first rows. Likewise."""
        # By name: a declaration imports nothing heavy, and this reads Parquet.
        columns = importlib.import_module("prl_trainer_fsdp.sft.columns")
        found: Iterator[tuple[str, str]] = columns.data_problems(data)
        return found
