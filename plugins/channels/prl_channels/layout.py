"""How tensors stand in a version: in parts, each a run of bytes without gaps.

A part takes tensors as they come, up to a number of bytes. Within it those with larger elements stand first, so that
every tensor is aligned to its own element, which is also what the safetensors format asks for. The same tensors in the
same order therefore give the same layout, which is what a delta needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from prl.errors import WeightsError
from prl_channels.manifest import Manifest, TensorEntry, dtype_name

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
"""What the safetensors format can hold, and its names."""
DTYPES = {dtype_name(dtype): dtype for dtype in TAGS}


@dataclass(frozen=True)
class Place:
    """Of one tensor in a part."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Gathered:
    """A part in the making: its tensors, contiguous and in order, and where they will stand."""

    tensors: list[Tensor]
    places: list[Place]

    @property
    def bytes(self) -> int:
        return self.places[-1].offset + self.places[-1].bytes

    def pieces(self) -> list[Tensor]:
        """Its bytes, tensor by tensor."""
        return [tensor.reshape(-1).view(torch.uint8) for tensor in self.tensors]

    def packed(self) -> Tensor:
        """Its bytes in one tensor, u8[bytes]."""
        return torch.cat(self.pieces())

    def classes(self) -> list[tuple[int, int, int]]:
        """Runs of elements of one size: (start, end, bytes of an element)."""
        runs: list[tuple[int, int, int]] = []
        for place in self.places:
            start, element = place.offset, place.dtype.itemsize
            if runs and runs[-1][2] == element:
                start = runs.pop()[0]
            runs.append((start, place.offset + place.bytes, element))
        return [run for run in runs if run[1] > run[0]]


def gather(
    tensors: Iterable[tuple[str, Tensor]], limit: int, device: torch.device | None
) -> Iterator[tuple[Gathered, dict[str, TensorEntry]]]:
    """Parts of at most `limit` bytes, or of one tensor that is larger. Each tensor is copied as it comes: the next one
    may use its memory (a gathered parameter's buffer), and tied ones become two.

    Args:
        device: where the copies are to be; None leaves each on its own.

    Raises:
        WeightsError: two tensors have one name, or one has a type that the format lacks.
    """
    seen: set[str] = set()
    held: list[tuple[str, Tensor]] = []
    size = count = 0
    for name, tensor in tensors:
        if name in seen:
            raise WeightsError(f"two tensors are called {name!r}: an engine could only install one of them")
        if tensor.dtype not in TAGS:
            raise WeightsError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold")
        seen.add(name)
        if held and size + tensor.nbytes > limit:
            yield _part(held, count)
            held, size, count = [], 0, count + 1
        held.append((name, tensor.detach().to(device or tensor.device, copy=True).contiguous()))
        size += tensor.nbytes
    if held:
        yield _part(held, count)


def _part(held: list[tuple[str, Tensor]], index: int) -> tuple[Gathered, dict[str, TensorEntry]]:
    ordered = sorted(held, key=lambda item: -item[1].element_size())
    ends = accumulate((tensor.nbytes for _, tensor in ordered), initial=0)
    places = [
        Place(name, tensor.dtype, tuple(tensor.shape), offset)
        for (name, tensor), offset in zip(ordered, ends, strict=False)
    ]
    entries = {place.name: TensorEntry(index, place.offset, dtype_name(place.dtype), place.shape) for place in places}
    return Gathered([tensor for _, tensor in ordered], places), entries


def tensors_of(manifest: Manifest, contents: Sequence[Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a version in the bytes of its parts, u8[bytes] each, which they share.

    Raises:
        WeightsError: the manifest places one outside its part.
    """
    found: dict[str, Tensor] = {}
    for name, entry in manifest.tensors.items():
        dtype, shape = DTYPES.get(entry.dtype), torch.Size(entry.shape)
        content = contents[entry.part]
        end = entry.offset + (shape.numel() * dtype.itemsize if dtype is not None else 0)
        if dtype is None or end > content.numel() or entry.offset % dtype.itemsize:
            raise WeightsError(
                f"version {manifest.version}: {name!r} is said to be {entry.dtype} {list(shape)} at byte "
                f"{entry.offset} of a part of {content.numel()}"
            )
        if shape.numel() == 0:
            found[name] = torch.empty(shape, dtype=dtype, device=content.device)
        else:
            found[name] = content[entry.offset : end].view(dtype).view(shape)
    return found
