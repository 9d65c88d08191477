"""Memory on the trainer's GPU, which engines of the same host open by a handle: nothing leaves it, and an engine on
another one copies over NVLink or PCIe.

Every segment is an allocation of its own. The trainer waits for its copies before the manifest is written; an engine
opens what the manifest names, checks it where it lies, and installs from there. The memory is given back when the
version is released, which is after every engine has let go of it. When the trainer's process ends, the driver frees it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from prl.errors import WeightsError
from prl_channels.checksum import checksum
from prl_channels.config import CudaIpcConfig
from prl_channels.encoding.full import Encoded
from prl_channels.manifest import Manifest, Segment
from prl_channels.transports import cuda, origin

INSTEAD = 'use the channel "nccl" or "filesystem"'
_PLACE = re.compile(rf"ipc:(?P<device>[0-9A-Za-z-]+):(?P<handle>[0-9a-f]{{{2 * cuda.HANDLE_BYTES}}})")


class CudaIpcOutlet:
    name = "cuda_ipc"

    def __init__(self, config: CudaIpcConfig) -> None:
        cuda.runtime()
        self.device: torch.device | None = torch.device("cuda", torch.cuda.current_device())
        self._origin = origin.own()
        self._arenas: dict[str, cuda.Arena] = {}

    def origin(self) -> dict[str, str]:
        return self._origin

    def put(self, draft: Path, index: int, encoded: Encoded) -> Segment:
        arena = cuda.Arena(max(1, encoded.payload_bytes))
        try:
            content = arena.tensor()[: encoded.payload_bytes]
            at = 0
            for piece in encoded.pieces:
                content[at : at + piece.numel()] = piece
                at += piece.numel()
            assert self.device is not None
            place = f"ipc:{cuda.device_name(self.device)}:{arena.handle()}"
            segment = Segment(place, at, checksum(content))
        except BaseException:
            arena.close()
            raise
        self._arenas[place] = arena
        return segment

    def settle(self) -> None:
        torch.cuda.synchronize()

    def drop(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            arena = self._arenas.pop(segment.place, None)
            if arena is not None:
                arena.close()

    def close(self) -> None:
        while self._arenas:
            self._arenas.popitem()[1].close()


class CudaIpcInlet:
    def __init__(self, config: CudaIpcConfig) -> None:
        cuda.runtime()
        self._opened: WeakValueDictionary[str, cuda.Opened] = WeakValueDictionary()
        """A process may open a handle once."""

    def get(self, directory: Path, manifest: Manifest, deadline: float) -> Sequence[Tensor | None]:
        origin.process_of(manifest.origin, INSTEAD)
        return [None if part.segment is None else self._get(part.segment, manifest) for part in manifest.parts]

    def _get(self, segment: Segment, manifest: Manifest) -> Tensor:
        place = _PLACE.fullmatch(segment.place)
        if place is None:
            raise WeightsError(f"version {manifest.version}: {segment.place!r} names no memory of a GPU")
        opened = self._opened.get(place["handle"])
        if opened is None:
            opened = cuda.Opened(place["handle"], max(1, segment.bytes))
            self._opened[place["handle"]] = opened
        content = opened.tensor()[: segment.bytes]
        if place["device"] != cuda.device_name(content.device):
            content = content.clone()  # what is read several times should be near
        found = checksum(content)
        if found != segment.checksum:
            raise WeightsError(
                f"version {manifest.version}: memory of the trainer's GPU is not what was sent: its checksum is "
                f"{found}, the manifest says {segment.checksum}"
            )
        torch.cuda.synchronize()
        return content
