"""A model, its loss and its optimiser: one step on packed rows. Reinforcement learning and supervised runs share it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prl.config.schema import ModelTable
from prl.errors import RunFailed
from prl.loss import Loss
from prl.rows import PackedRow
from prl_models.batch import PackedBatch
from prl_models.provider import Gather
from prl_trainer_fsdp.assembly import assemble
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.metrics import StepMetrics
from prl_trainer_fsdp.optim import Optimizer, clip
from prl_trainer_fsdp.parallel import Runtime, gather, reshard
from prl_trainer_fsdp.rows import DeviceRow, device_row, empty_row
from prl_trainer_fsdp.schedules import learning_rate


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
        named = self.model.named_parameters()
        return [(name.removeprefix("hf."), parameter) for name, parameter in named if parameter.requires_grad]

    def disk_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published and exported. Collective: every rank has to go through all of it."""
        return disk_tensors(self.model, self.dtype, gather)

    def step(self, rows: Sequence[PackedRow], denominators: dict[str, float], version: int) -> dict[str, float]:
        """One optimiser step on this rank's rows; all ranks have the same number, empty ones included.

        Raises:
            RunFailed: the gradient is not finite; nothing was changed.
        """
        metrics = StepMetrics(self.runtime)
        for row in self._computed(rows):
            self.mark("rows")
            real = row.num_tokens > 0
            on_device = device_row(row if real else empty_row(), self.runtime.device)
            self._accumulate(on_device, denominators, version, real, metrics)
        self.mark("optimizer")
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
        self.mark("metrics")
        return {**metrics.reduce(), "train/grad_norm": norm, "train/lr": rate}

    @torch.no_grad()
    def evaluate(self, rows: Sequence[PackedRow], denominators: dict[str, float]) -> dict[str, float]:
        """The metrics of a step without one: nothing is trained."""
        metrics = StepMetrics(self.runtime)
        for row in self._computed(rows):
            real = row.num_tokens > 0
            on_device = device_row(row if real else empty_row(), self.runtime.device)
            logprobs, entropy = self.model(on_device.batch)
            outputs = self.loss(on_device.loss_inputs(logprobs, entropy, 0, denominators))
            metrics.add_row(on_device, logprobs, entropy, outputs, 0, real)
        reshard(self.model)
        return metrics.reduce()

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token at temperature 1; the first of a sequence is 0. Collective."""
        lengths = [len(sequence) for sequence in sequences]
        bounds = np.cumsum([0, *lengths]).astype(np.int32)
        targets = np.setdiff1d(np.arange(bounds[-1]), bounds[:-1])
        tokens = np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences])
        ones = np.ones(len(targets), np.float32)
        batch = PackedBatch.build(tokens, bounds, targets, ones, self.runtime.device)
        logprobs = np.zeros(bounds[-1], np.float64)
        logprobs[targets] = self.model(batch)[0].double().cpu().numpy()
        reshard(self.model)
        return [part.tolist() for part in np.split(logprobs, bounds[1:-1])]

    def _computed(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Rows without tokens are computed only where other ranks may have some."""
        return [row for row in rows if row.num_tokens or self.runtime.world > 1]

    def _accumulate(
        self, row: DeviceRow, denominators: dict[str, float], version: int, real: bool, metrics: StepMetrics
    ) -> None:
        self.mark("forward")
        logprobs, entropy = self.model(row.batch)
        outputs = self.loss(row.loss_inputs(logprobs, entropy, version, denominators))
        self.mark("backward")
        loss: Tensor = outputs.loss
        if not real:
            # Every rank's graph must hold every collective, also where the loss ignores its inputs.
            loss = loss * 0.0 + (logprobs.sum() + entropy.sum()) * 0.0
        loss.backward()
        self.mark("metrics")
        metrics.add_row(row, logprobs.detach(), entropy.detach(), outputs, version, real)


def _unmarked(part: str) -> None:
    """Nobody measures."""


def disk_tensors(model: Any, dtype: str, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, whole tensor) in the precision of the forward pass, one gathered at a time."""
    precision = getattr(torch, dtype)
    for name, tensor in model.disk_tensors(gather):
        yield name, tensor.to(precision) if tensor.dtype == torch.float32 else tensor
