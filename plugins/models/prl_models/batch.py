"""What a model is given: one packed row on its device, and the tokens whose log-probability is wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prl_models.blocks.context import ContextParallel
from prl_models.blocks.packing import Packing, shared_prefixes

_SHARE_UP_TO = 512
"""Longest document for which shared prefixes are looked for: the search takes a sort for every depth."""


@dataclass(frozen=True)
class PackedBatch:
    """One packed row of U distinct tokens, and M predictions that are wanted; or, where ranks share rows, this rank's
    U tokens and M predictions of it.

    Args:
        token_ids, position_ids: i64[U]; positions start at 0 in every document.
        packing: where documents begin and end, and which token stands where; always of the whole row.
        parents: i64[M]: the token whose hidden state predicts. labels: i64[M]: the token id that followed it.
        temperatures: f32[M], all above 0.
        predictions: i64[N]: for each target of the row its prediction; None where they are the same, in order.
        mine: i64[M]: which of the row's targets this rank predicts; None: all of them.
    """

    token_ids: Tensor
    position_ids: Tensor
    packing: Packing
    parents: Tensor
    labels: Tensor
    temperatures: Tensor
    predictions: Tensor | None = None
    mine: Tensor | None = None

    @staticmethod
    def build(
        token_ids: NDArray[np.int32],
        cu_seqlens: NDArray[np.int32],
        targets: NDArray[np.int64],
        temperatures: NDArray[np.float32],
        device: torch.device,
        *,
        share: bool | None = None,
        context: ContextParallel | None = None,
    ) -> PackedBatch:
        """From arrays of the whole row on the host.

        Args:
            token_ids: i32[T]. cu_seqlens: i32[documents + 1].
            targets: i64[N]: tokens of the row whose log-probability is wanted; none may be a document's first.
            temperatures: f32[N].
            share: compute what follows the same prefix once; None does where it is known to pay: on CPU.
            context: the ranks that share the row. It is padded to parts of equal length by a document that nothing is
                wanted of; tokens are computed by the rank that `ContextParallel.places` gives them, once each.
        """
        if context is not None:
            return _part(token_ids, cu_seqlens, targets, temperatures, device, context)
        if share is None:
            share = device.type == "cpu" and int(np.diff(cu_seqlens).max()) <= _SHARE_UP_TO
        token_of = shared_prefixes(token_ids, cu_seqlens) if share else None
        packing = Packing(cu_seqlens, device, token_of)
        positions = np.arange(len(token_ids)) - np.repeat(packing.starts, packing.lengths)
        parents, labels, predictions = targets - 1, token_ids[targets], None
        if token_of is not None:
            first = np.empty(packing.num_tokens, np.int64)
            first[token_of[::-1]] = np.arange(len(token_of))[::-1]
            parents = token_of[parents]
            token_ids, positions = token_ids[first], positions[first]
            if len(temperatures) and (temperatures == temperatures[0]).all():
                _, chosen, predictions = np.unique(token_of[targets], return_index=True, return_inverse=True)
                parents, labels, temperatures = parents[chosen], labels[chosen], temperatures[chosen]
        return PackedBatch(
            to_device(token_ids.astype(np.int64), device),
            to_device(positions, device),
            packing,
            to_device(parents, device),
            to_device(labels.astype(np.int64), device),
            to_device(temperatures, device),
            None if predictions is None else to_device(predictions, device),
        )


def _part(
    token_ids: NDArray[np.int32],
    cu_seqlens: NDArray[np.int32],
    targets: NDArray[np.int64],
    temperatures: NDArray[np.float32],
    device: torch.device,
    context: ContextParallel,
) -> PackedBatch:
    tokens = len(token_ids)
    padded = context.padded(tokens)
    if padded > tokens:
        token_ids = np.concatenate([token_ids, np.zeros(padded - tokens, token_ids.dtype)])
        cu_seqlens = np.append(cu_seqlens, padded).astype(np.int32)
    packing = Packing(cu_seqlens, device)
    positions = np.arange(padded) - np.repeat(packing.starts, packing.lengths)
    places = context.places(padded)
    local = np.full(padded, -1)
    local[places] = np.arange(len(places))
    mine = np.flatnonzero(local[targets - 1] >= 0)
    wanted = targets[mine]
    return PackedBatch(
        to_device(token_ids[places].astype(np.int64), device),
        to_device(positions[places], device),
        packing,
        to_device(local[wanted - 1], device),
        to_device(token_ids[wanted].astype(np.int64), device),
        to_device(temperatures[mine], device),
        mine=to_device(mine, device),
    )


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A tensor of its own: arrays of a message are views of read-only bytes."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if device.type == "cpu" else tensor.to(device)
