"""All bytes of a part, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from prl_channels.layout import Gathered
from prl_channels.manifest import Block, Part, Segment

RAW = "raw"


@dataclass(frozen=True)
class Encoded:
    """What a transport is to keep of a part: `pieces`, u8[n] each, one after another. None means that nothing changed.

    `gathered` says that they are the tensors themselves.
    """

    bytes: int
    pieces: Sequence[Tensor] = ()
    blocks: Sequence[Block] = ()
    checksum: str = ""
    gathered: Gathered | None = None

    @property
    def payload_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def part(self, segment: Segment | None) -> Part:
        return Part(self.bytes, list(self.blocks), segment, self.checksum)


def encode(gathered: Gathered, pieces: Sequence[Tensor] | None = None, checksum: str = "") -> Encoded:
    """`pieces` are the part's bytes where they have been put together already."""
    size = gathered.bytes
    return Encoded(size, pieces or gathered.pieces(), [Block(RAW, 0, size, 0, size)], checksum, gathered)
