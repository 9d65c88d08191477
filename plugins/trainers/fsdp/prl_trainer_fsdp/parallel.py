"""Processes, devices and sharding.

A float32 model in one process is left as it is. Everything else goes through FSDP2: several processes share parameters,
gradients and moments; bfloat16 computes with bfloat16 copies of float32 parameters, also in one process.

Every loss is divided by denominators of the whole step, so gradients of ranks are summed, never averaged.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from prl.errors import EnvironmentNotFit
from prl_trainer_fsdp.ranks import MEETING_PLACE


@dataclass(frozen=True)
class Runtime:
    """This process among the `world` of its group."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


def start(device: Literal["auto", "cpu", "cuda"], threads: int, environ: Mapping[str, str] = os.environ) -> Runtime:
    """Choose the device and join the process group that the environment describes: `ranks`' or torchrun's.

    Raises:
        EnvironmentNotFit: CUDA is asked for and there is none.
    """
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise EnvironmentNotFit('trainer.device = "cuda", but torch finds no GPU: use "auto" or "cpu"')
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if threads:
        torch.set_num_threads(threads)
    where = torch.device(device)
    if device == "cuda":
        where = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    else:
        keep_memory()
    if world > 1:
        place = f"file://{environ[MEETING_PLACE]}" if MEETING_PLACE in environ else "env://"
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=world)
    return Runtime(rank, world, where)


def shard(model: nn.Module, blocks: list[nn.Module], runtime: Runtime, dtype: str) -> None:
    """Shard each block and then what remains over all processes; see the module's docstring."""
    if runtime.world == 1 and dtype == "float32":
        return
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if runtime.device.type == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    compute = torch.bfloat16 if dtype == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one: FSDP leaves the root's parameters whole, in a buffer of its own."""
    if isinstance(model, FSDPModule):
        model.reshard()


def gather(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, placed as `like` is."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def sum_over_ranks(values: Tensor, runtime: Runtime) -> Tensor:
    if runtime.world > 1:
        dist.all_reduce(values)
    return values


def max_over_ranks(values: Tensor, runtime: Runtime) -> Tensor:
    if runtime.world > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def share_bytes(data: bytes, runtime: Runtime) -> bytes:
    """The leader's bytes, on every rank."""
    if runtime.world == 1:
        return data
    size = torch.tensor([len(data)], device=runtime.device)
    dist.broadcast(size, 0)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if runtime.is_leader:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    buffer = buffer.to(runtime.device)
    dist.broadcast(buffer, 0)
    return buffer.cpu().numpy().tobytes()


def keep_memory() -> None:
    """Have glibc keep freed memory of up to 32 MiB a piece instead of returning it to the system.

    A step allocates and frees the same activations again and again; faulting their pages in took 20 of 170 ms of a step
    of 2,800 tokens. One arena, because a thread's own arena is returned whatever the thresholds say.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return
    arena_max, mmap_threshold, trim_threshold, top_pad = -8, -3, -1, -2
    for option, value in (
        (arena_max, 1),
        (mmap_threshold, 32 << 20),
        (trim_threshold, (1 << 31) - 1),
        (top_pad, 64 << 20),
    ):
        mallopt(option, value)
