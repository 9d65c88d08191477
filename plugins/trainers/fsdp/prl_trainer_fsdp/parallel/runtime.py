"""This process among those of its group: its device, how it joins, and what ranks tell one another."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.schema import RunConfig, TrainerTable
from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.blocks.context import ContextParallel
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.parallel import mesh
from prl_trainer_fsdp.parallel.layout import ALONE, Layout
from prl_trainer_fsdp.ranks import MEETING_PLACE

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """This process among the `world` of its group. `meshes` are None in a process alone."""

    rank: int
    world: int
    device: torch.device
    layout: Layout = ALONE
    meshes: mesh.Meshes | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which rows are this rank's, of `layout.data_ranks`."""
        return self.rank // self.layout.cp

    @property
    def context_rank(self) -> int:
        """This rank's place among those that share its rows; 0 counts what all of them compute."""
        return self.rank % self.layout.cp

    @property
    def context(self) -> ContextParallel | None:
        return None if self.meshes is None else self.meshes.context

    def laid_out(self, own: FsdpConfig) -> Runtime:
        """The same ranks in the layout that a configuration asks for. Collective."""
        layout = own.layout(self.world)
        return replace(self, layout=layout, meshes=mesh.make(layout, self.rank, self.device.type, own.cp_style))


class Configuration(Protocol):
    """What a run's, a supervised run's and a benchmark's configuration have in common."""

    @property
    def trainer(self) -> TrainerTable: ...

    def model_dump_json(self) -> str: ...


def start(config: Configuration, environ: Mapping[str, str] = os.environ) -> Runtime:
    """Choose the device and join the process group that the environment describes: `ranks`' or torchrun's.

    Raises:
        ConfigError: so many processes cannot be laid out as the configuration says, or ranks have different ones.
        EnvironmentNotFit: CUDA is asked for and there is none, or not a GPU for every process.
    """
    own = cast(FsdpConfig, config.trainer.plugin_config())
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    if isinstance(config, RunConfig) and world != config.trainer.processes:
        raise ConfigError(
            [f"trainer.processes is {config.trainer.processes}, but the trainer was started as {world} processes"]
        )
    own.layout(world)  # what cannot be is said before any rank waits for another
    device = _device(own.device, environ)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    if device.type == "cpu":
        keep_memory()
    if world == 1:
        return Runtime(rank, world, device)
    if rank > 0:  # which code and kernels a model took is said once, by the first rank
        logging.getLogger("prl_models").setLevel(logging.WARNING)
    place = f"file://{environ[MEETING_PLACE]}" if MEETING_PLACE in environ else "env://"
    bound = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend(device), init_method=place, rank=rank, world_size=world, **bound)
    _check_agreement(config, world, device)
    return Runtime(rank, world, device).laid_out(own)


def leave() -> None:
    """Every rank does, when all have ended well: NCCL complains of communicators that are left open."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end(code: int) -> NoReturn:
    """End a rank's process with this exit code: with gloo's threads alive, 5 of 50 interpreters that ended by
    themselves aborted."""
    if code == 0:
        leave()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _device(wanted: str, environ: Mapping[str, str]) -> torch.device:
    """A process takes the GPU of its number on this machine."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not gpus:
        raise EnvironmentNotFit('trainer.device = "cuda", but torch finds no GPU: use "auto" or "cpu"')
    if wanted == "cpu" or not gpus:
        return torch.device("cpu")
    local = int(environ.get("LOCAL_RANK", "0"))
    processes = max(local + 1, int(environ.get("LOCAL_WORLD_SIZE", "1")))
    if processes > gpus:
        raise EnvironmentNotFit(
            f"{processes} trainer processes need a GPU each, but torch finds {gpus} on this machine: "
            f'set trainer.processes = {gpus}, or trainer.device = "cpu"'
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _check_agreement(config: Configuration, world: int, device: torch.device) -> None:
    """Ranks that were given different things would wait for one another for ever, or train nonsense.

    Raises:
        ConfigError: a rank's configuration, or its torch, is not the first rank's.
    """
    facts = (config.model_dump_json(), torch.__version__)
    own = [int.from_bytes(hashlib.sha256(fact.encode()).digest()[:7], "big") for fact in facts]
    table = torch.zeros(world, len(own), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(table, torch.tensor([own], dtype=torch.int64, device=device))
    differing = table.ne(table[0]).cpu()
    for column, what in enumerate(("configuration", "version of torch")):
        ranks = differing[:, column].nonzero().flatten().tolist()
        if ranks:
            names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            raise ConfigError(
                [f"of {world} ranks, {names} were started with another {what} than rank 0: give all of them the same"]
            )


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
    return data if runtime.world == 1 else _broadcast(data, runtime, 0, None)


def share_in_row(make: Callable[[], T], kind: type[T], runtime: Runtime) -> T:
    """What the first of the ranks that share this one's rows makes, on all of them; the others make nothing."""
    if runtime.context is None:
        return make()
    first = runtime.rank - runtime.context_rank
    made = msgspec.msgpack.encode(make()) if runtime.rank == first else b""
    return msgspec.msgpack.decode(_broadcast(made, runtime, first, runtime.context.group), type=kind)


def _broadcast(data: bytes, runtime: Runtime, source: int, group: dist.ProcessGroup | None) -> bytes:
    size = torch.tensor([len(data)], device=runtime.device)
    dist.broadcast(size, source, group)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if runtime.rank == source and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    buffer = buffer.to(runtime.device)
    dist.broadcast(buffer, source, group)
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
