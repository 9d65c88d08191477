"""Memory of the trainer's process (memfd_create(2)), which engines of the same host open as /proc/PID/fd/N and map.

It has no name in any file system: whatever kills the trainer, the kernel frees it once no engine maps it any more. It
is sealed once it is written, so that nobody can change what a manifest describes.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from prl.errors import EnvironmentNotFit, WeightsError
from prl_channels.config import ShmConfig
from prl_channels.encoding.full import Encoded
from prl_channels.manifest import Manifest, Segment
from prl_channels.transports import origin
from prl_channels.transports.host import get_all, mapped, write_pieces

INSTEAD = 'use the channel "filesystem", with runs_dir where both see it'
_PLACE = re.compile(r"fd:([0-9]+):([0-9]+)")


class MemoryOutlet:
    name = "shm"
    device: torch.device | None = torch.device("cpu")

    def __init__(self, config: ShmConfig) -> None:
        if not hasattr(os, "memfd_create"):
            raise EnvironmentNotFit(f"the channel shm needs Linux (memfd_create): {INSTEAD}")
        self._origin = origin.own()
        self._held: set[int] = set()

    def origin(self) -> dict[str, str]:
        return self._origin

    def put(self, draft: Path, index: int, encoded: Encoded) -> Segment:
        descriptor = os.memfd_create(f"prl-weights-{draft.stem}-{index}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size, checksum = write_pieces(descriptor, b"", encoded.pieces)
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(descriptor)
            raise
        self._held.add(descriptor)
        return Segment(f"fd:{descriptor}:{os.fstat(descriptor).st_ino}", size, checksum)

    def settle(self) -> None:
        pass

    def drop(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._close(int(segment.place.split(":")[1]))

    def close(self) -> None:
        for descriptor in list(self._held):
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._held:
            self._held.remove(descriptor)
            os.close(descriptor)


class MemoryInlet:
    def __init__(self, config: ShmConfig) -> None:
        self._config = config

    def get(self, directory: Path, manifest: Manifest, deadline: float) -> Sequence[Tensor | None]:
        pid = origin.process_of(manifest.origin, INSTEAD)

        def look(segment: Segment) -> Tensor:
            place = _PLACE.fullmatch(segment.place)
            if place is None:
                raise WeightsError(f"{directory}: {segment.place!r} names no memory of a process")
            path = f"/proc/{pid}/fd/{place[1]}"
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise WeightsError(
                    f"{path}: version {manifest.version} was released, or the trainer's process has ended"
                ) from error
            except OSError as error:
                raise WeightsError(
                    f"{path}: the trainer's memory cannot be opened ({error.strerror}): both processes have to belong "
                    f"to one user; or {INSTEAD}"
                ) from error
            try:
                if os.fstat(descriptor).st_ino != int(place[2]):
                    raise WeightsError(f"{path}: version {manifest.version} was released")
                return mapped(descriptor, segment, path)
            finally:
                os.close(descriptor)

        return get_all(manifest, look, deadline, self._config.threads)
