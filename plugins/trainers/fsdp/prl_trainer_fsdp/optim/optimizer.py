"""The optimiser: AdamW, SGD and Muon over shards, its state by parameter name, and clipping.

The optimisers are torch's, and `muon.Muon`. They are given each parameter's local part as a plain tensor: what they do
is element by element (Muon looks after its matrices itself), and torch's fused kernels take plain tensors on every
device, DTensors not on the CPU.

State on the host (`offload_optimizer`, `offload.py`): parameters are divided into buckets, each with an optimiser of
its own whose state lies in one piece of the host's memory. While a bucket is updated the next one's state comes in and
the former one's goes out. AdamW moves 8 bytes a parameter each way, both at once, and the update has the same bits as
without. An update on the CPU would move half of that, but takes the CPU's time and gives other bits (torchao's
CPUOffloadOptimizer does it, for tensors that are not sharded); FSDP2's own offloading moves the parameters too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.optim.muon import Muon, rows_of
from prl_trainer_fsdp.optim.offload import HostState, step_all

BUCKET = 1 << 26
"""Parameters in a bucket of the offloaded state, 512 MiB of AdamW's; three are on the device at a time."""


@dataclass(frozen=True)
class _Part:
    """A parameter, and its local part as an optimiser sees it; the parameter itself where it is not sharded."""

    name: str
    parameter: nn.Parameter
    local: Tensor


@dataclass(frozen=True)
class _Unit:
    """Parameters that are updated together; `host` holds their state where that is offloaded."""

    parts: Sequence[_Part]
    optimizer: torch.optim.Optimizer
    host: HostState | None


class Optimizer:
    """The parameters that are trained, and what moves them.

    Args:
        parameters: by name; frozen ones are left out. Sharded or not, on one kind of device, all float32.
        blocks: the repeated layers: Muon takes their matrices and leaves all else to AdamW.
    """

    def __init__(
        self, config: FsdpConfig, parameters: Iterable[tuple[str, nn.Parameter]], blocks: Sequence[nn.Module] = ()
    ) -> None:
        parts = [
            _Part(name, p, _local(p).detach() if isinstance(p, DTensor) else p)
            for name, p in parameters
            if p.requires_grad
        ]
        inner = {id(p) for block in blocks for p in block.parameters()}
        muon = config.optimizer == "muon"
        matrices = [part for part in parts if muon and part.parameter.ndim >= 2 and id(part.parameter) in inner]
        chosen = {part.name for part in matrices}
        others = [part for part in parts if part.name not in chosen]
        make = _sgd if config.optimizer == "sgd" else _adamw
        self._units = [*_units(config, _muon, matrices), *_units(config, make, others)]

    def step(self, rate: float) -> None:
        """Update every parameter that has a gradient, at this learning rate."""
        sharded = [part for unit in self._units for part in unit.parts if part.local is not part.parameter]
        for part in sharded:
            gradient = part.parameter.grad
            part.local.data = _local(part.parameter).detach()
            part.local.grad = None if gradient is None else _local(gradient)
        for unit in self._units:
            for group in unit.optimizer.param_groups:
                group["lr"] = rate
        step_all([(unit.optimizer, unit.host) for unit in self._units])
        for part in sharded:
            part.local.grad = None

    def zero_grad(self) -> None:
        for unit in self._units:
            for part in unit.parts:
                part.parameter.grad = None

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """("exp_avg.NAME", tensor) for all state of all trained parameters; complete before the first step too.

        What belongs to the parameter element by element is placed as it is (a DTensor of a sharded one, whose part may
        lie on the host); the others ("step") have no dimension and are equal on all ranks. Nothing is exchanged.
        """
        for part, key, value in self._state():
            yield f"{key}.{part.name}", value if value.ndim == 0 else _placed(value, part.parameter)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `named_state` gave, placed likewise.

        Raises:
            KeyError: some of it is not there.
        """
        for part, key, value in self._state():
            value.copy_(_local(state[f"{key}.{part.name}"]))

    def _state(self) -> Iterator[tuple[_Part, str, Tensor]]:
        for unit in self._units:
            for part in unit.parts:
                for key, value in unit.optimizer.state[part.local].items():
                    yield part, key, value


Make = Callable[[FsdpConfig, Sequence[_Part]], torch.optim.Optimizer]


def _units(config: FsdpConfig, make: Make, parts: Sequence[_Part]) -> Iterator[_Unit]:
    for bucket in _buckets(parts) if config.offload_optimizer else [parts] if parts else []:
        optimizer = make(config, bucket)
        for part in bucket:
            optimizer.state[part.local] = _blank(optimizer, part.local)
        yield _Unit(bucket, optimizer, HostState(optimizer) if config.offload_optimizer else None)


def _buckets(parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """In order, cut by whole sizes, so that all ranks cut at the same place."""
    bucket: list[_Part] = []
    size = 0
    for part in parts:
        if bucket and size + part.parameter.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += part.parameter.numel()
    if bucket:
        yield bucket


def _adamw(config: FsdpConfig, parts: Sequence[_Part]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) in one pass over all parameters."""
    return torch.optim.AdamW(_groups(config, parts), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _sgd(config: FsdpConfig, parts: Sequence[_Part]) -> torch.optim.Optimizer:
    """Stochastic gradient descent; the decay is added to the gradient."""
    return torch.optim.SGD(_groups(config, parts), lr=config.lr, momentum=config.momentum, fused=True)


def _muon(config: FsdpConfig, parts: Sequence[_Part]) -> torch.optim.Optimizer:
    rows = {part.local: found for part in parts if (found := rows_of(part.parameter)) is not None}
    dtype = torch.bfloat16 if parts[0].local.is_cuda else torch.float32
    return Muon(
        [part.local for part in parts],
        rows,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        dtype=dtype,
    )


def _groups(config: FsdpConfig, parts: Sequence[_Part]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    matrices = [part.local for part in parts if part.parameter.ndim >= 2]
    vectors = [part.local for part in parts if part.parameter.ndim < 2]
    pairs = ((matrices, config.weight_decay), (vectors, 0.0))
    return [{"params": group, "weight_decay": decay} for group, decay in pairs if group]


def _blank(optimizer: torch.optim.Optimizer, local: Tensor) -> dict[str, Tensor]:
    """The state that the optimiser would make in its first step, with the same result."""
    if isinstance(optimizer, torch.optim.AdamW):
        step = torch.zeros((), dtype=torch.float32, device=local.device)  # the fused kernel counts there
        return {"step": step, "exp_avg": torch.zeros_like(local), "exp_avg_sq": torch.zeros_like(local)}
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]:
        return {}
    return {"momentum_buffer": torch.zeros_like(local)}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(local: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return local
    # Not DTensor.from_local, which would move a part on the host to the device of the mesh.
    return DTensor(local, like._spec, requires_grad=False)


def clip(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit` (0 never scales); returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_mesh: dict[object, list[Tensor]] = {}
    for gradient in gradients:  # one call cannot take tensors of different meshes
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [_whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if limit > 0:
        scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
        if float(scale) != 1.0:  # a pass over all gradients that is worth a look first
            torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)
    return norm
