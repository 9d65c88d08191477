"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_channels.config import CudaIpcConfig, FilesystemConfig, NcclConfig, ShmConfig

FILESYSTEM = Contribution(
    factory="prl_channels.channel:filesystem",
    config=FilesystemConfig,
    summary="safetensors and a checksummed manifest in a directory; the default, works everywhere",
)
SHM = Contribution(
    factory="prl_channels.channel:shm",
    config=ShmConfig,
    summary="memory of the trainer's process that engines of the same host map; nothing is left on a disk",
)
CUDA_IPC = Contribution(
    factory="prl_channels.channel:cuda_ipc",
    config=CudaIpcConfig,
    summary="memory of the trainer's GPU that engines of the same host open: no copy where they share the GPU",
)
NCCL = Contribution(
    factory="prl_channels.channel:nccl",
    config=NcclConfig,
    summary="from the trainer's GPU to engines on other GPUs, of the same host or of others",
)
