"""Writing safetensors files from memory in one pass, with their checksum.

safetensors' own `save_file` copies every tensor once more before it writes, and a checksum would have to read the file
again: for a checkpoint of some GiB a rank that is memory and minutes. The format (https://github.com/huggingface/safetensors)
is a length of 8 bytes, a JSON header, and the tensors one after another without gaps.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
"""Written and hashed at a time; both let other threads run meanwhile."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_file(
    path: Path, entries: Sequence[Entry], data: Iterable[memoryview], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write the entries, whose bytes follow one another in `data`, and wait until they are on the disk.

    Returns:
        The file's size, and its sha256 in hex.

    Raises:
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for piece in (memoryview(header(entries, metadata)), *data):
            for start in range(0, len(piece), CHUNK_BYTES):
                chunk = piece[start : start + CHUNK_BYTES]
                file.write(chunk)
                digest.update(chunk)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


class ShardWriter:
    """A file that is written tensor by tensor, none of which is kept: the header's place is left free until the end.

    Raises:
        OSError: it cannot be written.
    """

    HEADER_BYTES = 256 << 10
    """Kept free: 1,800 tensors. What the header does not need is filled with spaces, as the format allows."""

    def __init__(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        self.entries: list[Entry] = []
        self.size = 0
        self._metadata = metadata
        self._described = 0
        self._file = path.open("wb")
        self._file.seek(self.HEADER_BYTES)

    def fits(self, name: str) -> bool:
        """Whether the header has room for another tensor of this name, whatever its shape."""
        return self._described + len(name) + 256 < self.HEADER_BYTES

    def add(self, name: str, tensor: Tensor) -> None:
        self.entries.append(Entry(name, tensor.dtype, tuple(tensor.shape)))
        self._described += len(name) + 200
        self._file.write(bytes_of(tensor.detach().cpu().contiguous()))
        self.size += tensor.nbytes

    def close(self, complete: bool = True) -> None:
        """Write the header, and wait until all of it is on the disk."""
        with self._file as file:
            if complete:
                file.seek(0)
                file.write(header(self.entries, self._metadata, self.HEADER_BYTES))
                file.flush()
                os.fsync(file.fileno())


def header(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None, size: int = 0) -> bytes:
    """The bytes before the first tensor: `size`, or as many as it takes for tensors to begin at a multiple of 8."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        end = at + entry.num_bytes
        described[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (size - 8 - len(text) if size else -len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
