"""What the transports over files and over memory of the host share: writing with a checksum, mapping, verifying."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from prl_channels.manifest import Manifest, Segment
from prl_channels.patience import NotYetError, patiently


def write_pieces(descriptor: int, header: bytes, pieces: Sequence[Tensor]) -> tuple[int, str]:
    """Bytes written, and their checksum. `pieces` are u8[n] on the CPU."""
    digest = hashlib.sha256()
    size = 0
    for chunk in (memoryview(header), *(memoryview(piece.numpy()) for piece in pieces)):
        digest.update(chunk)
        size += len(chunk)
        left = chunk
        while left:  # one write takes at most 2 GB on Linux, and fewer when the disk fills
            left = left[os.write(descriptor, left) :]
    return size, _named(digest.hexdigest())


def mapped(descriptor: int, segment: Segment, what: str) -> Tensor:
    """The bytes of an open file, verified; u8[n]. Writing to them changes no file.

    Raises:
        NotYetError: it has another size or other bytes.
    """
    size = os.fstat(descriptor).st_size
    if size != segment.bytes:
        raise NotYetError(f"{what}: {size} bytes, the manifest says {segment.bytes}: truncated or incomplete")
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    area = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    found = _named(hashlib.sha256(area).hexdigest())
    if found != segment.checksum:
        raise NotYetError(
            f"{what}: corrupted: its checksum is {found[:23]}..., the manifest says {segment.checksum[:23]}..."
        )
    return torch.frombuffer(area, dtype=torch.uint8)


def get_all(
    manifest: Manifest, look: Callable[[Segment], Tensor], deadline: float, threads: int
) -> list[Tensor | None]:
    """`look` at the segment of every part, several at once, patiently."""

    def get(segment: Segment | None) -> Tensor | None:
        return None if segment is None else patiently(lambda: look(segment), deadline)

    segments = [part.segment for part in manifest.parts]
    if len(segments) < 2:
        return [get(segment) for segment in segments]
    with ThreadPoolExecutor(min(threads, len(segments))) as pool:
        return list(pool.map(get, segments))


def _named(digest: str) -> str:
    return f"sha256:{digest}"
