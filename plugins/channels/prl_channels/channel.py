"""What the factories build: a channel of one transport. Its two halves are loaded by the process that needs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from prl.protocols import ChannelPlugin, ChannelReceiver, ChannelSender
from prl_channels.config import ChannelConfig, CudaIpcConfig, FilesystemConfig, NcclConfig, ShmConfig

if TYPE_CHECKING:
    from prl_channels.transports.base import Inlet, Outlet

C = TypeVar("C", bound=ChannelConfig)


class Channel(Generic[C]):
    """`ends` imports a transport and gives its two classes, of the sender's and of the receiver's side."""

    def __init__(self, config: C, ends: Callable[[], tuple[Callable[[C], Outlet], Callable[[C], Inlet]]]) -> None:
        self.config = config
        self._ends = ends

    def sender(self, directory: Path) -> ChannelSender:
        from prl_channels.sender import Sender

        return Sender(directory, self.config, self._ends()[0](self.config))

    def receiver(self) -> ChannelReceiver:
        from prl_channels.receiver import Receiver

        return Receiver(self.config, self._ends()[1](self.config))


def filesystem(config: FilesystemConfig) -> ChannelPlugin:
    def ends() -> tuple[Callable[[FilesystemConfig], Outlet], Callable[[FilesystemConfig], Inlet]]:
        from prl_channels.transports import filesystem

        return filesystem.FilesystemOutlet, filesystem.FilesystemInlet

    return Channel(config, ends)


def shm(config: ShmConfig) -> ChannelPlugin:
    def ends() -> tuple[Callable[[ShmConfig], Outlet], Callable[[ShmConfig], Inlet]]:
        from prl_channels.transports import memory

        return memory.MemoryOutlet, memory.MemoryInlet

    return Channel(config, ends)


def cuda_ipc(config: CudaIpcConfig) -> ChannelPlugin:
    def ends() -> tuple[Callable[[CudaIpcConfig], Outlet], Callable[[CudaIpcConfig], Inlet]]:
        from prl_channels.transports import ipc

        return ipc.CudaIpcOutlet, ipc.CudaIpcInlet

    return Channel(config, ends)


def nccl(config: NcclConfig) -> ChannelPlugin:
    def ends() -> tuple[Callable[[NcclConfig], Outlet], Callable[[NcclConfig], Inlet]]:
        from prl_channels.transports import nccl

        return nccl.NcclOutlet, nccl.NcclInlet

    return Channel(config, ends)
