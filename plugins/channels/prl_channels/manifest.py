"""The manifest: what a directory of weights must contain, word for word. Written last, read first.

    v_000012/
      manifest.json          this
      00000.safetensors      shards, in the order in which the tensors were sent
      00001.safetensors

It also carries the probes: short sequences with the trainer's log-probabilities, which an engine must reproduce.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from prl.errors import WeightsError
from prl.protocols import Adapter, Probe

SCHEMA = 1
NAME = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+\.safetensors")


class FileEntry(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class TensorEntry(msgspec.Struct, frozen=True):
    """`dtype` is the name torch gives it, without the "torch." in front."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    schema: int
    version: int
    incarnation: int
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    probes: list[Probe]
    tolerance: float
    adapter: Adapter | None = None


class _SchemaOnly(msgspec.Struct):
    schema: int


def directory_name(version: int) -> str:
    return f"v_{version:06d}"


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def write(manifest: Manifest, directory: Path) -> Path:
    path = directory / NAME
    path.write_bytes(msgspec.json.encode(manifest))
    return path


def parse(content: bytes, path: Path) -> Manifest:
    """Raises:
    WeightsError: it is not a manifest, is of a newer schema, or names a file outside its directory.
    """
    try:
        schema = msgspec.json.decode(content, type=_SchemaOnly).schema
        if schema > SCHEMA:
            raise WeightsError(
                f"{path}: manifest schema {schema} is newer than this reader's {SCHEMA}: update prl-channels where the "
                "engine runs"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path}: not a manifest of weights: {error}") from error
    for name in manifest.files:
        if not _PLAIN_NAME.fullmatch(name):
            raise WeightsError(f"{path}: the file name {name!r} is not a plain one: refused")
    for name, tensor in manifest.tensors.items():
        if tensor.file not in manifest.files:
            raise WeightsError(f"{path}: tensor {name!r} is said to be in {tensor.file!r}, which the manifest lacks")
    return manifest
