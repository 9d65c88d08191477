"""The groups of ranks that a layout means, once the process group exists.

    shard     one dimension of all ranks, or (dp_replicate, dp_shard x cp): FSDP2 shards over the last
    context   the ranks that share this rank's rows
    experts   (dp_replicate, dp_shard x cp / ep, ep)

Groups are made with `new_group`, which splits NCCL's communicator where it is bound to a device and works with gloo
too; every rank makes every group, in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from prl.errors import EnvironmentNotFit
from prl_models.blocks.context import ContextParallel
from prl_trainer_fsdp.parallel.layout import Layout


@dataclass(frozen=True)
class Meshes:
    shard: DeviceMesh
    context: ContextParallel | None = None
    experts: DeviceMesh | None = None


def make(layout: Layout, rank: int, device_type: str, style: Literal["ulysses", "ring"]) -> Meshes:
    """Collective: every rank makes the same meshes.

    Raises:
        EnvironmentNotFit: a group has other members than the layout says.
    """
    replicate, shards, cp, ep = layout.dp_replicate, layout.shards, layout.cp, layout.ep
    shape = {"dp_replicate": replicate, "shard": shards} if replicate > 1 else {"shard": shards}
    meshes = Meshes(
        _mesh(shape, device_type),
        ContextParallel(_group((layout.data_ranks, cp), 1), style) if cp > 1 else None,
        _mesh({"dp_replicate": replicate, "ep_shard": shards // ep, "ep": ep}, device_type) if ep > 1 else None,
    )
    _check(meshes, layout, rank)
    return meshes


def _mesh(shape: dict[str, int], device_type: str) -> DeviceMesh:
    sizes = tuple(shape.values())
    groups = [_group(sizes, dimension) for dimension in range(len(sizes))]
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        device_type,
        mesh=ranks if len(groups) > 1 else None,
        mesh_dim_names=tuple(shape),
    )


def _group(sizes: tuple[int, ...], dimension: int) -> dist.ProcessGroup:
    """This rank's group along one dimension of all ranks in that shape."""
    if sizes[dimension] == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    lines = torch.arange(math.prod(sizes)).view(sizes).movedim(dimension, -1).reshape(-1, sizes[dimension])
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(lines.tolist())[0]
    return group


def _check(meshes: Meshes, layout: Layout, rank: int) -> None:
    """What exists against what was asked for."""
    replica, shard = divmod(rank, layout.shards)
    found = {"shard": _members(meshes.shard)[-1]}
    wanted = {"shard": list(range(replica * layout.shards, (replica + 1) * layout.shards))}
    if layout.dp_replicate > 1:
        found["dp_replicate"] = _members(meshes.shard)[0]
        wanted["dp_replicate"] = list(range(shard, layout.world, layout.shards))
    if meshes.context is not None:
        found["cp"] = dist.get_process_group_ranks(meshes.context.group)
        wanted["cp"] = list(range(rank // layout.cp * layout.cp, (rank // layout.cp + 1) * layout.cp))
    if meshes.experts is not None:
        found["ep"] = _members(meshes.experts)[-1]
        wanted["ep"] = list(range(rank // layout.ep * layout.ep, (rank // layout.ep + 1) * layout.ep))
    for name, ranks in wanted.items():
        if found[name] != ranks:
            raise EnvironmentNotFit(f"rank {rank}: the group {name!r} is {found[name]}, but {layout} means {ranks}")


def _members(mesh: DeviceMesh) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
