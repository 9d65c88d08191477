"""A packed row on its device: what the model computes, and what the loss is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.loss import LossInputs
from prl.rows import PackedRow
from prl_models.batch import PackedBatch, to_device
from prl_models.blocks.context import ContextParallel, sum_over_context


@dataclass(frozen=True)
class DeviceRow:
    """A row of T tokens with N targets: the tokens that are trained or were sampled, never a document's first.

    `batch` is the model's part, this rank's alone where several share the row; `targets` i64[N]; the others are the
    loss's, [T], as `prl.loss.LossInputs` has them.
    """

    batch: PackedBatch
    targets: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    rl: Tensor
    ce: Tensor
    ref_kl: Tensor
    sampled: Tensor
    versions: Tensor
    cu_seqlens: Tensor
    context: ContextParallel | None = None

    def loss_inputs(
        self, logprobs: Tensor, entropy: Tensor, version: int, denominators: dict[str, float]
    ) -> LossInputs:
        """Of the whole row, from what the model gave of this rank's targets; at other tokens both are 0, without
        gradient. Collective among the ranks that share the row."""
        logprobs, entropy = self._whole(torch.stack([logprobs, entropy])).unbind(0)
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            sampler_logprobs=self.sampler_logprobs,
            advantages=self.advantages,
            rl_weights=self.rl,
            ce_weights=self.ce,
            ref_kl_weights=self.ref_kl,
            sampled=self.sampled,
            versions=self.versions,
            cu_seqlens=self.cu_seqlens,
            version=version,
            denominators=denominators,
        )

    def _whole(self, values: Tensor) -> Tensor:
        """[2, N] -> [2, T]."""
        mine = self.batch.mine
        at = self.targets if mine is None else self.targets.index_select(0, mine)
        return sum_over_context(values.new_zeros(2, len(self.sampled)).index_copy(1, at, values), self.context)


def device_row(row: PackedRow, device: torch.device, context: ContextParallel | None = None) -> DeviceRow:
    wanted = row.sampled | (row.rl != 0) | (row.ce != 0) | (row.ref_kl != 0)
    wanted[row.cu_seqlens[:-1]] = False
    targets = np.flatnonzero(wanted)
    return DeviceRow(
        PackedBatch.build(row.token_ids, row.cu_seqlens, targets, row.temperatures[targets], device, context=context),
        to_device(targets, device),
        to_device(row.logprobs, device),
        to_device(row.advantages, device),
        to_device(row.rl, device),
        to_device(row.ce, device),
        to_device(row.ref_kl, device),
        to_device(row.sampled, device),
        to_device(row.versions, device),
        to_device(row.cu_seqlens, device),
        context,
    )


def empty_row() -> PackedRow:
    """Two tokens that weigh nothing: a rank without work still takes part in every collective of a row."""
    nothing = np.zeros(2, np.float32)
    return PackedRow(
        token_ids=np.zeros(2, np.int32),
        position_ids=np.arange(2, dtype=np.int32),
        cu_seqlens=np.array([0, 2], np.int32),
        sampled=np.zeros(2, np.bool_),
        logprobs=nothing,
        versions=np.full(2, -1, np.int32),
        temperatures=np.ones(2, np.float32),
        advantages=nothing,
        rl=nothing,
        ce=nothing,
        ref_kl=nothing,
    )
