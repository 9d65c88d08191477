"""Parameters, gradients and moments shared out over ranks.

In one process a model is left as it is if it computes in float32, or casts its weights where it uses them. Everything
else goes through FSDP2: several processes share parameters, gradients and moments, and bfloat16 computes with bfloat16
copies of float32 parameters.

Every loss is divided by denominators of the whole update, so gradients of ranks are summed, never averaged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prl_trainer_fsdp.parallel.runtime import Runtime, backend

_SMALL = 1 / 20
"""Share of a GPU's memory that whole parameters may keep between forward and backward: 3.5 billion in bfloat16 on an
H200, for a third of the communication."""


def shard(model: Any, runtime: Runtime, dtype: str) -> None:
    """Shard each block and then what remains over the ranks; see the module's docstring.

    A block is gathered when it is reached, while the one before computes, and again in the backward pass, unless all of
    them whole are a small part of the device's memory. The rest (embedding, last norm, head) stays whole between the
    two: its backward pass begins at once.
    """
    if runtime.world == 1 and (dtype == "float32" or model.casts):
        return
    if runtime.meshes is not None:
        over = runtime.meshes.shard
    else:
        if not dist.is_initialized():
            dist.init_process_group(backend(runtime.device), store=dist.HashStore(), rank=0, world_size=1)
        over = init_device_mesh(runtime.device.type, (1,))
    compute = torch.bfloat16 if dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    blocks = list(model.blocks)
    again = not _is_small(model, runtime.device, compute or torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=again and module is not model)
    for module, following in zip((model, *blocks), blocks, strict=False):
        module.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _is_small(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether whole parameters take no more than `_SMALL` of a GPU's memory."""
    if device.type != "cuda":
        return False
    whole = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return whole <= _SMALL * torch.cuda.get_device_properties(device).total_memory


def reshard(model: Any) -> None:
    """After a forward pass without a backward one: what FSDP has left whole, in buffers of its own."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, placed as `like` is, which may be on "meta" if it is sharded. No more than the part
    travels to the device, and none of `whole` is kept."""
    if not isinstance(like, DTensor):
        return whole.to(like.device)
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    part = whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
    local = part.to(like.device_mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
