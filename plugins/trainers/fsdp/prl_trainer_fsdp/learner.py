"""A model, its loss and its optimiser: one step on packed rows. Reinforcement learning and supervised runs share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prl.adapters import peft_name
from prl.config.schema import ModelTable
from prl.errors import RunFailed
from prl.loss import Loss, LossInputs, LossOutputs
from prl.messages import Correction
from prl.rows import PackedRow
from prl_models.batch import PackedBatch
from prl_models.blocks.context import sum_over_context
from prl_models.blocks.lora import is_adapter
from prl_models.provider import Gather
from prl_trainer_fsdp.assembly import assemble
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.corrections import NONE, Corrected, correct
from prl_trainer_fsdp.metrics import StepMetrics
from prl_trainer_fsdp.optim import Optimizer, clip
from prl_trainer_fsdp.optim.schedules import learning_rate
from prl_trainer_fsdp.parallel.runtime import Runtime
from prl_trainer_fsdp.parallel.sharding import gather, reshard
from prl_trainer_fsdp.rows import DeviceRow, device_row, empty_row


@dataclass(frozen=True)
class Update:
    """One optimiser step: this rank's rows, and the denominators of all ranks' rows."""

    rows: Sequence[PackedRow]
    denominators: dict[str, float]


@dataclass(frozen=True)
class _Computed:
    """A row after its forward pass; one that is not `real` is without samples."""

    real: bool
    row: DeviceRow
    corrected: Corrected
    outputs: LossOutputs

    @property
    def inputs(self) -> LossInputs:
        return self.corrected.inputs


class Learner:
    """Parameters are float32; `table.dtype` is the precision of forward and backward. `steps` counts updates.

    `mark` is told which part of a step begins: for every row "rows", "forward", "backward" and "metrics", then
    "optimizer" and "metrics" once.
    """

    def __init__(self, table: ModelTable, config: FsdpConfig, loss: Loss, runtime: Runtime) -> None:
        self.config = config
        self.loss = loss
        self.runtime = runtime
        self.dtype = table.dtype
        self.model: Any = assemble(table, config, runtime)
        self.optimizer = Optimizer(config, self.parameters(), self.model.blocks)
        self.steps = 0
        self.mark: Callable[[str], None] = _unmarked

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, and saved: all of the model, tied parameters once, or its adapters. Named as in
        transformers."""
        return list(trained_parameters(self.model))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The persistent ones, which are saved too."""
        return list(persistent_buffers(self.model))

    def disk_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published and exported. Collective: every rank has to go through all of it."""
        return disk_tensors(self.model, self.dtype, gather)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters alone, under PEFT's names, in the precision that they are computed with. Collective."""
        precision = getattr(torch, self.dtype)
        for name, parameter in self.parameters():
            if is_adapter(name):
                yield peft_name(name), gather(parameter.detach()).to(precision)

    def step(self, rows: Sequence[PackedRow], denominators: dict[str, float], version: int) -> dict[str, float]:
        """One optimiser step on this rank's rows; all ranks have the same number, empty ones included.

        Raises:
            RunFailed: the gradient is not finite; nothing was changed.
        """
        return self.train([Update(rows, denominators)], version)

    def train(self, updates: Sequence[Update], version: int, correction: Correction = NONE) -> dict[str, float]:
        """Optimiser steps one after another, as many on all ranks, under one correction; their metrics together.

        `train/loss` and `train/grad_norm` are means over the updates, `train/lr` is the last one's. What policy
        `version` sampled counts as mismatch in the first update only: then the parameters have moved.

        Raises:
            RunFailed: a gradient is not finite; it changed nothing.
        """
        metrics = StepMetrics(self.runtime)
        norms, rate = [], 0.0
        for index, update in enumerate(updates):
            for row in self._computed(update.rows):
                computed = self._forward(row, update.denominators, version, correction)
                self._accumulate(computed)
                self._book(computed, metrics, moved=index > 0)
            self.mark("optimizer")
            norm, rate = self._update()
            norms.append(norm)
        self.mark("metrics")
        found = metrics.reduce()
        found["train/loss"] /= len(updates)
        return {**found, "train/grad_norm": sum(norms) / len(norms), "train/lr": rate}

    @torch.no_grad()
    def evaluate(self, rows: Sequence[PackedRow], denominators: dict[str, float]) -> dict[str, float]:
        """The metrics of a step without one: nothing is trained."""
        metrics = StepMetrics(self.runtime)
        for row in self._computed(rows):
            self._book(self._forward(row, denominators, 0), metrics)
        reshard(self.model)
        return metrics.reduce()

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token at temperature 1; the first of a sequence is 0. Collective; ranks that share
        rows give the same sequences."""
        lengths = [len(sequence) for sequence in sequences]
        bounds = np.cumsum([0, *lengths]).astype(np.int32)
        targets = np.setdiff1d(np.arange(bounds[-1]), bounds[:-1])
        tokens = np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences])
        ones, context = np.ones(len(targets), np.float32), self.runtime.context
        batch = PackedBatch.build(tokens, bounds, targets, ones, self.runtime.device, context=context)
        found = self.model(batch)[0]
        if batch.mine is not None:
            found = sum_over_context(found.new_zeros(len(targets)).index_copy(0, batch.mine, found), context)
        logprobs = np.zeros(bounds[-1], np.float64)
        logprobs[targets] = found.double().cpu().numpy()
        reshard(self.model)
        return [part.tolist() for part in np.split(logprobs, bounds[1:-1])]

    def _computed(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Rows without tokens are computed only where other ranks may have some."""
        return [row for row in rows if row.num_tokens or self.runtime.world > 1]

    def _forward(
        self, row: PackedRow, denominators: dict[str, float], version: int, correction: Correction = NONE
    ) -> _Computed:
        self.mark("rows")
        real = row.num_tokens > 0
        self._check_tokens(row)
        on_device = device_row(row if real else empty_row(), self.runtime.device, self.runtime.context)
        self.mark("forward")
        logprobs, entropy = self.model(on_device.batch)
        corrected = correct(on_device.loss_inputs(logprobs, entropy, version, denominators), correction)
        return _Computed(real, on_device, corrected, self.loss(corrected.inputs))

    def _check_tokens(self, row: PackedRow) -> None:
        """On a GPU a token without an embedding would end the process without a word of it.

        Raises:
            RunFailed: there is one.
        """
        ids = row.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.model.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise RunFailed(
                f"a sample has token {wrong}, but the model has embeddings for 0 to {self.model.vocab_size - 1}: its "
                "tokenizer belongs to another model"
            )

    def _accumulate(self, computed: _Computed) -> None:
        self.mark("backward")
        loss = computed.outputs.loss
        if not computed.real:
            # Every rank's graph must hold every collective, also where the loss ignores its inputs.
            loss = loss * 0.0 + (computed.inputs.logprobs.sum() + computed.inputs.entropy.sum()) * 0.0
        loss.backward()

    def _book(self, computed: _Computed, metrics: StepMetrics, *, moved: bool = False) -> None:
        """Every rank that shares a row knows all of it: the first counts."""
        self.mark("metrics")
        if computed.real and self.runtime.context_rank == 0:
            metrics.add_row(computed.row, computed.corrected, computed.outputs, moved=moved)
        else:
            metrics.add_nothing(computed.corrected, computed.outputs)

    def _update(self) -> tuple[float, float]:
        """Move the parameters along what was accumulated: the gradient's norm and the rate.

        Raises:
            RunFailed: the gradient is not finite; nothing was changed.
        """
        norm = float(clip([parameter for _, parameter in self.parameters()], self.config.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise RunFailed(
                f"the gradient of step {self.steps + 1} has norm {norm}: its loss is not finite or overflowed. "
                f"Lower the learning rate (now {self.config.lr:g}), or look for extreme log-probabilities in the batch"
            )
        rate = learning_rate(self.config, self.steps + 1)
        self.optimizer.step(rate)
        self.optimizer.zero_grad()
        self.steps += 1
        return norm, rate


def _unmarked(part: str) -> None:
    """Nobody measures."""


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix("hf."), parameter


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name.removeprefix("hf."), buffer


def disk_tensors(model: Any, dtype: str, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, whole tensor) in the precision of the forward pass, one gathered at a time."""
    precision = getattr(torch, dtype)
    for name, tensor in model.disk_tensors(gather):
        yield name, tensor.to(precision) if tensor.dtype == torch.float32 else tensor
