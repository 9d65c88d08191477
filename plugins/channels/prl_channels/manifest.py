"""The manifest of a version: which tensors it holds, where their bytes lie, how they are encoded. Written last.

Tensors stand one after another in *parts* (`prl_channels.layout`). A transport keeps one *segment* of bytes for each
part that has changed; its *blocks* say which bytes of the part they are. A manifest with a `base` describes changes of
that version, which is told by its number, its incarnation and a digest of all its bytes.

It also carries the probes: short sequences with the trainer's log-probabilities, which an engine must reproduce.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prl.errors import WeightsError
from prl.protocols import Adapter, Probe

SCHEMA = 2


class Segment(msgspec.Struct, frozen=True):
    """Bytes that a transport keeps. `place` is the transport's own; the blocks begin after `head` bytes."""

    place: str
    bytes: int
    checksum: str
    head: int = 0


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Some of a part's bytes.

    Args:
        form: "raw", or one of `prl_channels.encoding.delta`.
        start, bytes: which bytes of the part.
        offset, size: where they are encoded in the segment, counted from its head.
        element: bytes of one element.
        count: elements that the encoding names.
    """

    form: str
    start: int
    bytes: int
    offset: int
    size: int
    element: int = 1
    count: int = 0


class Part(msgspec.Struct, frozen=True):
    """`checksum` is of its decoded bytes, "" where no delta may follow. Without blocks it is the base's."""

    bytes: int
    blocks: list[Block]
    segment: Segment | None = None
    checksum: str = ""


class TensorEntry(msgspec.Struct, frozen=True):
    """`dtype` is the name torch gives it, without the "torch." in front; `offset` counts bytes of the part."""

    part: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Base(msgspec.Struct, frozen=True):
    """The version that a delta changes."""

    version: int
    incarnation: int
    digest: str
    location: str


class Manifest(msgspec.Struct, frozen=True):
    """`origin` is what a transport says of the sender; `digest` is "" where no delta may follow."""

    schema: int
    transport: str
    version: int
    incarnation: int
    origin: dict[str, str]
    parts: list[Part]
    tensors: dict[str, TensorEntry]
    probes: list[Probe]
    tolerance: float
    adapter: Adapter | None = None
    digest: str = ""
    base: Base | None = None

    @property
    def num_bytes(self) -> int:
        """What a reader with the base has to read."""
        return sum(part.segment.bytes for part in self.parts if part.segment is not None)


class _Sealed(msgspec.Struct):
    """What is in the file: the manifest's JSON as it was written, and its checksum."""

    sha256: str
    manifest: msgspec.Raw


class _SchemaOnly(msgspec.Struct):
    schema: int


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def digest_of(parts: Sequence[Part], tensors: dict[str, TensorEntry]) -> str:
    """Of the decoded bytes of all tensors, their names, types and shapes."""
    content = msgspec.json.encode([[(part.bytes, part.checksum) for part in parts], list(tensors.items())])
    return hashlib.sha256(content).hexdigest()


def encode(manifest: Manifest) -> bytes:
    content = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(hashlib.sha256(content).hexdigest(), msgspec.Raw(content)))


def parse(content: bytes, path: Path) -> Manifest:
    """Raises:
    WeightsError: it is not a manifest, was altered, is of another schema, or names bytes that its parts do not have.
    """
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        found = hashlib.sha256(sealed.manifest).hexdigest()
        if found != sealed.sha256:
            raise WeightsError(
                f"{path}: not the manifest that was written: its sha256 is {found[:16]}..., not {sealed.sha256[:16]}..."
            )
        schema = msgspec.json.decode(sealed.manifest, type=_SchemaOnly).schema
        if schema != SCHEMA:
            older, where = ("older", "trainer") if schema < SCHEMA else ("newer", "engine")
            raise WeightsError(
                f"{path}: manifest schema {schema} is {older} than this reader's {SCHEMA}: update prl-channels where "
                f"the {where} runs"
            )
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path}: not a manifest of weights: {error}") from error
    for index, part in enumerate(manifest.parts):
        _check_part(part, f"{path}: part {index}", has_base=manifest.base is not None)
    for name, tensor in manifest.tensors.items():
        if not 0 <= tensor.part < len(manifest.parts):
            raise WeightsError(f"{path}: tensor {name!r} is said to be in part {tensor.part}, which the manifest lacks")
        if tensor.offset < 0 or any(size < 0 for size in tensor.shape):
            raise WeightsError(f"{path}: tensor {name!r} has shape {list(tensor.shape)} at {tensor.offset}")
    return manifest


def _check_part(part: Part, where: str, *, has_base: bool) -> None:
    if part.blocks and part.segment is None:
        raise WeightsError(f"{where} has blocks and no segment")
    if not part.blocks and part.bytes and not has_base:
        raise WeightsError(f"{where} has no blocks, and there is no base to take its {part.bytes} bytes from")
    room = part.segment.bytes - part.segment.head if part.segment is not None else 0
    for block in part.blocks:
        inside = 0 <= block.start <= block.start + block.bytes <= part.bytes
        if not inside or not 0 <= block.offset <= block.offset + block.size <= room or block.count < 0:
            raise WeightsError(f"{where} has a block outside its {part.bytes} bytes, or its segment of {room}: {block}")
    if not has_base and sum(block.bytes for block in part.blocks if block.form == "raw") != part.bytes:
        raise WeightsError(f"{where} is not whole, and there is no base")
