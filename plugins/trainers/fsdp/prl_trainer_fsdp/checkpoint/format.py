"""The JSON files of a checkpoint, and what is checked of them before anything is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prl.errors import StoreError
from prl.store.files import sha256_file
from prl.types import SCHEMA_VERSION
from prl_trainer_fsdp.checkpoint.layout import Box

T = TypeVar("T", "Facts", "RankFile")

FACTS = "trainer.json"
PARAMETER, BUFFER, OPTIMIZER = "parameter", "buffer", "optimizer"
"""The kinds of tensors; a file calls them "optimizer/exp_avg.NAME"."""


class Piece(msgspec.Struct, frozen=True):
    """A slice of a tensor, whole in one file; `key` is its name there."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


class Stored(msgspec.Struct):
    """What a file holds of a tensor: its whole shape, and slices."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]


class RankFile(msgspec.Struct):
    """`rank-00003.json`. `tensors` are by kind and name; `random` are states of generators by device, in hex."""

    file: str
    bytes: int
    sha256: str
    tensors: dict[str, dict[str, Stored]]
    random: dict[str, str]
    schema: int = SCHEMA_VERSION


class Facts(msgspec.Struct):
    """`trainer.json`: of all ranks the same. `facts` are the caller's."""

    ranks: int
    optimizer_steps: int
    facts: dict[str, Any]
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Whole:
    """A tensor of a checkpoint: its shape, and the slices of all files by file name."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[str, Piece]]


@dataclass(frozen=True)
class Index:
    """All of a checkpoint but the tensors' values."""

    path: Path
    facts: Facts
    ranks: list[RankFile]
    tensors: dict[str, dict[str, Whole]]

    def of(self, kind: str) -> Mapping[str, Whole]:
        return self.tensors.get(kind, {})

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Compare every `world`-th file with its size and checksum.

        Raises:
            StoreError: one is missing, truncated or altered.
        """
        for number, held in enumerate(self.ranks):
            file = self.path / held.file
            check_size(file, held.bytes)
            if number % world == rank and sha256_file(file) != held.sha256:
                raise StoreError(
                    f"{file} was altered: its sha256 is not {held.sha256}. Resume from an older checkpoint"
                )


def rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def read_index(path: Path) -> Index:
    """Raises: StoreError: a file is missing or damaged, or slices of a tensor are."""
    facts = _read(path / FACTS, Facts)
    ranks = [_read(path / f"{rank_name(rank)}.json", RankFile) for rank in range(facts.ranks)]
    tensors: dict[str, dict[str, Whole]] = defaultdict(dict)
    for held in ranks:
        for kind, named in held.tensors.items():
            for name, stored in named.items():
                whole = tensors[kind].setdefault(name, Whole(stored.shape, stored.dtype, []))
                whole.pieces.extend((held.file, piece) for piece in stored.pieces)
    for name, whole in _each(tensors):
        covered = sum(piece.box.numel for _, piece in whole.pieces)
        if covered != math.prod(whole.shape):
            raise StoreError(
                f"the checkpoint {path} has {covered} of the {math.prod(whole.shape)} elements of {name!r}: a rank's "
                "files belong to another checkpoint. Resume from an older one"
            )
    return Index(path, facts, ranks, dict(tensors))


def check_size(file: Path, size: int) -> None:
    try:
        actual = file.stat().st_size
    except OSError as error:
        raise StoreError(f"the checkpoint file {file} is missing: {error}") from error
    if actual != size:
        what = "truncated" if actual < size else "longer than it was"
        raise StoreError(f"{file} is {what}: {actual} bytes instead of {size}. Resume from an older checkpoint")


def _each(tensors: Mapping[str, Mapping[str, Whole]]) -> Iterator[tuple[str, Whole]]:
    for named in tensors.values():
        yield from named.items()


def _read(file: Path, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise StoreError(f"{file.parent} holds no whole checkpoint of a trainer: {file.name} is missing") from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} is damaged ({error}). Resume from an older checkpoint") from error
    if found.schema > SCHEMA_VERSION:
        raise StoreError(f"{file} has schema {found.schema}, this version reads up to {SCHEMA_VERSION}: upgrade prl")
    return found
