"""Which part of a tensor a rank holds, and who writes what several ranks hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Box:
    """A rectangular slice of a whole tensor: `offset` and `shape` have an entry per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Sequence[int]) -> tuple[slice, ...]:
        """Where this box lies in a tensor whose own first element is at `outer` of the whole."""
        return tuple(slice(o - base, o - base + n) for o, n, base in zip(self.offset, self.shape, outer, strict=True))

    def meet(self, other: Box) -> Box | None:
        """What both cover."""
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        pairs = [(max(a, b), min(a + n, b + m)) for a, n, b, m in ends]
        if any(end <= start for start, end in pairs):
            return None
        return Box(tuple(start for start, _ in pairs), tuple(end - start for start, end in pairs))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def boxes(tensor: Tensor) -> list[tuple[Box, tuple[slice, ...]]]:
    """What this rank holds of a tensor: slices of the whole, each with its place in the local part.

    One, unless a dimension is divided twice in an order that interleaves (experts over `ep`, then FSDP).
    """
    if not isinstance(tensor, DTensor):
        return [(Box((0,) * tensor.ndim, tuple(tensor.shape)), (slice(None),) * tensor.ndim)]
    per_dim = [_runs(tensor, dim) for dim in range(tensor.ndim)]
    found = []
    for runs in itertools.product(*per_dim):
        box = Box(tuple(start for start, _, _ in runs), tuple(length for _, _, length in runs))
        found.append((box, tuple(slice(at, at + length) for _, at, length in runs)))
    return [(box, place) for box, place in found if box.numel]


Runs = list[tuple[int, int, int]]
"""(start in the whole, start in the local part, length) of every run of indices of one dimension."""

_known: dict[tuple[object, ...], Runs] = {}


def _runs(tensor: DTensor, dim: int) -> Runs:
    mesh, size = tensor.device_mesh, tensor.shape[dim]
    placements = tuple(_only(placement, dim) for placement in tensor.placements)
    if all(placement.is_replicate() for placement in placements):
        return [(0, 0, size)]
    key = (size, placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
    if key not in _known:  # a few of a model's thousand: dividing costs 0.2 ms on a GPU
        # Torch divides the indices as it divides the tensor: there is no formula of ours to get wrong.
        indices = distribute_tensor(torch.arange(size), mesh, placements, src_data_rank=None)
        mine = indices.to_local().tolist()
        cuts = [i for i in range(len(mine)) if i == 0 or mine[i] != mine[i - 1] + 1]
        ends = [*cuts[1:], len(mine)] if cuts else []
        _known[key] = [(mine[start], start, end - start) for start, end in zip(cuts, ends, strict=True)]
    return _known[key]


def _only(placement: Placement, dim: int) -> Placement:
    """The placement of an index of dimension `dim`, a tensor of one dimension, on the same mesh dimension."""
    if isinstance(placement, _StridedShard) and placement.dim == dim:
        return _StridedShard(0, split_factor=placement.split_factor)
    return Shard(0) if placement.is_shard(dim) else Replicate()


class Owners:
    """Shares out what several ranks hold, by size. Every rank has to ask about the same tensors in the same order."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._loads: dict[int, list[int]] = {}

    def is_mine(self, tensor: Tensor) -> bool:
        """Whether this rank writes its copy of the part of `tensor` that it holds."""
        copies, copy = self._copies(tensor)
        loads = self._loads.setdefault(copies, [0] * copies)
        chosen = min(range(copies), key=loads.__getitem__)
        loads[chosen] += tensor.numel() * tensor.element_size()
        return chosen == copy

    def _copies(self, tensor: Tensor) -> tuple[int, int]:
        """How many ranks hold the same part, and which of them this is."""
        if not isinstance(tensor, DTensor):
            return self._world, self._rank
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if mesh.size() != self._world or coordinate is None:
            raise ValueError(f"a tensor over {mesh.size()} of {self._world} ranks: who holds it cannot be told")
        copies, copy = 1, 0
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                copies, copy = copies * mesh.size(dim), copy * mesh.size(dim) + coordinate[dim]
        return copies, copy
