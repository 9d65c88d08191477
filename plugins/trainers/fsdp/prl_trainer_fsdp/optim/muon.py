"""Muon on whole matrices, whatever the sharding.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) steps along the orthogonal factor of the averaged
gradient: U V^T of its singular value decomposition, by a Newton-Schulz iteration. That factor of a part of the rows is
not a part of the rows of that factor, so shards have to meet. torch.optim.Muon does that product by product (15
exchanges a matrix, and sums of bfloat16 whose order depends on the sharding). Here each matrix travels to one rank, is
orthogonalised there once, and travels back: two exchanges for as many matrices as there are ranks, and the same bits
as one process. The rest of the formula is torch.optim.Muon's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, chosen by Jordan et al. for its slope at zero."""
ITERATIONS = 5


@dataclass(frozen=True)
class Rows:
    """A matrix of `shape` whose rows are divided over the ranks of `group` as torch.chunk divides them."""

    shape: torch.Size
    group: dist.ProcessGroup

    def count(self, rank: int) -> int:
        """Elements that `rank` holds."""
        per_rank = -(-self.shape[0] // self.group.size())
        return max(0, min(per_rank, self.shape[0] - rank * per_rank)) * self.shape[1]


def rows_of(parameter: Tensor) -> Rows | None:
    """How a parameter is divided; None where every matrix of it is whole on some rank: not sharded, or a stack of
    matrices [E, N, M] that is sharded over E.

    Raises:
        ValueError: it is divided in a way that this module does not know.
    """
    if not isinstance(parameter, DTensor):
        return None
    dims = [i for i, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if parameter.ndim == 3 and all(parameter.placements[i].is_shard(0) for i in dims):
        return None
    if len(dims) != 1 or parameter.placements[dims[0]] != Shard(0):
        raise ValueError(f"Muon cannot orthogonalise a matrix that is divided as {parameter.placements}")
    return Rows(parameter.shape, parameter.device_mesh.get_group(dims[0]))


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T for matrix = U S V^T, [..., N, M]: singular values end between 0.7 and 1.2, which is as good for
    training (Jordan et al. 2024). Computed in `dtype`."""
    x = matrix.to(dtype)
    x = x.unsqueeze(0) if matrix.ndim == 2 else x
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    x = x.mT if tall else x
    return x.view(matrix.shape) if matrix.ndim == 2 else x


class Muon(torch.optim.Optimizer):
    """Parameters are the local parts of matrices [N, M], or stacks of matrices [E, N, M].

    The step of a matrix is lr * 0.2 * sqrt(max(N, M)) times the orthogonal factor: its root mean square is then that of
    a step of AdamW, so learning rates and decay of AdamW hold (Liu et al. 2025, arXiv 2502.16982, section 2.2).

    Args:
        rows: how the parameters that are divided are divided. Every rank has to give the same order of parameters.
        dtype: of the iteration.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        rows: Mapping[Tensor, Rows],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._rows = rows
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = [self._update(p, group["momentum"]) for p in parameters]
            rate, decay = group["lr"], group["weight_decay"]
            for parameter, factor in zip(parameters, self._factors(parameters, updates), strict=True):
                rows = self._rows.get(parameter)
                longer = max((rows.shape if rows else parameter.shape)[-2:])
                parameter.mul_(1 - rate * decay)
                parameter.add_(factor.to(parameter.dtype), alpha=-rate * 0.2 * math.sqrt(longer))

    def _update(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum of the gradient, in the precision of the iteration."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average, gradient = state["momentum_buffer"], parameter.grad
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).to(self._dtype)

    def _factors(self, parameters: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        factors = list(updates)
        divided: dict[dist.ProcessGroup, list[int]] = {}
        for index, parameter in enumerate(parameters):
            rows = self._rows.get(parameter)
            if rows is None:
                factors[index] = orthogonalise(updates[index], self._dtype)
            else:
                divided.setdefault(rows.group, []).append(index)
        for group, indices in divided.items():
            for start in range(0, len(indices), group.size()):
                batch = indices[start : start + group.size()]
                found = self._together([updates[i] for i in batch], [self._rows[parameters[i]] for i in batch], group)
                for index, factor in zip(batch, found, strict=True):
                    factors[index] = factor
        return factors

    def _together(self, parts: list[Tensor], rows: list[Rows], group: dist.ProcessGroup) -> list[Tensor]:
        """This rank's rows of the factors of at most as many matrices as there are ranks: rank i computes the i-th."""
        me, world = group.rank(), group.size()
        outgoing = [part.numel() for part in parts] + [0] * (world - len(parts))
        mine = rows[me] if me < len(rows) else None
        incoming = [mine.count(rank) if mine else 0 for rank in range(world)]
        whole = parts[0].new_empty(sum(incoming))
        sent = torch.cat([part.flatten() for part in parts])
        dist.all_to_all_single(whole, sent, incoming, outgoing, group=group)
        if mine:
            whole = orthogonalise(whole.view(mine.shape), self._dtype).flatten()
        factors = torch.empty_like(sent)
        dist.all_to_all_single(factors, whole.contiguous(), outgoing, incoming, group=group)
        pieces = factors.split(outgoing[: len(parts)])
        return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
