"""Settings of the channels."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from prl.contribution import PluginConfig
from prl.plan import GpuNeed


class ChannelConfig(PluginConfig):
    """What all channels have."""

    encoding: Literal["full", "delta"] = "full"
    """"full" sends every weight, "delta" what has changed since the version before. For that the sender keeps a copy of
    the weights, and an engine that has lost the version before reads the last full one and what followed."""
    chain_length: int = Field(16, ge=1)
    """With "delta": so many versions at most follow a full one."""
    chain_share: float = Field(0.5, gt=0)
    """With "delta": once those that follow a full version hold more than this share of its bytes, the next is full."""
    shard_bytes: int = Field(2_000_000_000, ge=1)
    """A file, or piece of memory, holds at most so many bytes of tensors, or one tensor that is larger. The sender
    gathers so much before it passes it on."""
    visibility_s: float = Field(2.0, ge=0)
    """How long a receiver waits for files that the sender has finished but that it cannot see yet (NFS caches), or
    that are not yet what the manifest says."""


class HostConfig(ChannelConfig):
    """Of the channels that carry weights through files or memory of the host."""

    threads: int = Field(4, ge=1)
    """Files whose checksums are computed at once; no more than there are files."""


class FilesystemConfig(HostConfig):
    fsync: bool = False
    """Force every file to disk before it becomes visible. Weights that a crash of the host destroys are sent again
    from the checkpoint, so that only a network file system that shows names before contents is a reason."""


class ShmConfig(HostConfig):
    pass


class CudaIpcConfig(ChannelConfig):
    """Weights stay on the trainer's GPU. That takes their size there for every version that is not yet released, two at
    most times."""

    gpus: ClassVar[GpuNeed] = "required"


class NcclConfig(ChannelConfig):
    """Weights stay on the trainer's GPU until their release; engines pull them."""

    gpus: ClassVar[GpuNeed] = "apart"

    host: str = Field("127.0.0.1", min_length=1)
    """Where the trainer listens for engines; with engines on other hosts an address that they reach it by."""
    timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """How long one transfer may take. An engine that dies in the midst of one is given up then."""
