"""Changed elements of a part against the part of the version before, which has the same tensors in the same places.

Elements are compared bit by bit, as integers of their size: NaN, -0.0 and every type of number are bits here. A part is
encoded in blocks of elements of one size, up to `BLOCK_BYTES` each. A block of n elements of e bytes, of which k have
changed, takes the shortest of these forms; one in which nothing has changed is left out.

| form    | bytes in the segment                                                     | size                  |
|---------|--------------------------------------------------------------------------|-----------------------|
| `gaps1` | the values of c >= k elements; c unsigned bytes, how many stand between   | c (e + 1)             |
| `gaps2` | the same with two bytes per gap                                          | c (e + 2)             |
| `mask`  | the values of the k elements; one bit per element of the block            | k e + 8 ceil(n / 64)  |
| `raw`   | all of them                                                              | n e                   |

A gap counts the elements left out between two that are named. One that is too long for its type is bridged by naming
elements that have not changed: c - k of them. So every form holds any change, and no block, hence no part, is ever
larger than in full. Blocks begin at multiples of 8 bytes, which costs at most 7 bytes each.

With 2% of a bfloat16 tensor changed `gaps1` takes 3% of its bytes; `mask` is shorter from one change in eight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.errors import WeightsError
from prl_channels.checksum import checksum
from prl_channels.encoding.full import RAW, Encoded
from prl_channels.layout import Gathered
from prl_channels.manifest import Block

GAPS = {"gaps1": 1, "gaps2": 2}
MASK = "mask"
BLOCK_BYTES = 16 << 20
"""Positions of changes are computed in 64 bits: at most four times this in between."""
ALIGNMENT = 8

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAP_TYPES = {1: torch.uint8, 2: torch.int16}
_PACK = 0x0102040810204080
"""Times eight bytes of 0 or 1, as a word, this has them as the bits of its highest byte: byte i moves by 56 - 7 i bits,
no two products meet in one bit, and all others fall below bit 56 or beyond 63."""


@dataclass(frozen=True)
class Changes:
    """A block in the form that was chosen: the values, then what says where they belong; u8 both."""

    form: str
    count: int
    pieces: Sequence[Tensor]


def encode(base: Tensor, content: Tensor, gathered: Gathered) -> Encoded:
    """What turns `base` into `content`, u8[bytes] both, on one device."""
    pieces: list[Tensor] = []
    blocks: list[Block] = []
    offset = 0
    for start, end, element in _blocks(gathered):
        old, new = (whole[start:end].view(INTEGERS[element]) for whole in (base, content))
        changes = changes_between(old, new)
        if changes is None:
            continue
        size = sum(piece.numel() for piece in changes.pieces)
        blocks.append(Block(changes.form, start, end - start, offset, size, element, changes.count))
        pieces.extend(changes.pieces)
        if size % ALIGNMENT:
            pieces.append(torch.zeros(ALIGNMENT - size % ALIGNMENT, dtype=torch.uint8, device=content.device))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Encoded(content.numel(), pieces, blocks, checksum(content))


def _blocks(gathered: Gathered) -> Iterator[tuple[int, int, int]]:
    for start, end, element in gathered.classes():
        for at in range(start, end, BLOCK_BYTES):
            yield at, min(end, at + BLOCK_BYTES), element


def changes_between(old: Tensor, new: Tensor) -> Changes | None:
    """The shortest form of what differs between two blocks, integers [n] both; None for nothing."""
    changed = old.ne(new)
    count, total, element = int(changed.count_nonzero()), new.numel(), new.element_size()
    if count == 0:
        return None
    masked = count * element + -(-total // 64) * 8
    if min(masked, count * (element + 1)) >= total * element:
        return Changes(RAW, total, [new.view(torch.uint8)])
    index = _nonzero(changed)
    gaps = index.diff(prepend=index.new_full((1,), -1)) - 1
    sizes = {MASK: masked, RAW: total * element}
    for form, width in GAPS.items():
        bridges = int((gaps >> (8 * width)).sum())
        sizes[form] = (count + bridges) * (element + width)
    form = min(sizes, key=lambda name: sizes[name])
    if form == RAW:
        return Changes(RAW, total, [new.view(torch.uint8)])
    if form == MASK:
        return Changes(MASK, count, [new[index].view(torch.uint8), pack_bits(changed)])
    codes, index = _bridged(gaps, GAPS[form])
    values = new[index].view(torch.uint8)
    return Changes(form, len(index), [values, codes.to(_GAP_TYPES[GAPS[form]]).view(torch.uint8)])


def _bridged(gaps: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Gaps that fit into `width` bytes, and the elements they lead to."""
    longest = (1 << (8 * width)) - 1
    ends = ((gaps >> (8 * width)) + 1).cumsum(0)
    codes = gaps.new_full((int(ends[-1]),), longest)
    codes[ends - 1] = gaps & longest
    return codes, (codes + 1).cumsum(0) - 1


def apply(block: Block, content: Tensor, payload: Tensor) -> None:
    """Change the bytes of a part, u8[bytes], as `block` of the segment's bytes after its head says.

    Raises:
        WeightsError: the block is not what its form should be.
    """
    data = payload[block.offset : block.offset + block.size]
    target = content[block.start : block.start + block.bytes]
    if block.form == RAW:
        if block.size != block.bytes:
            raise WeightsError(f"a raw block of {block.bytes} bytes has {block.size}")
        target.copy_(data)
        return
    if block.element not in INTEGERS or block.bytes % block.element or block.form not in (*GAPS, MASK):
        raise WeightsError(f"a block in the form {block.form!r} with elements of {block.element} bytes: unknown")
    elements = target.view(INTEGERS[block.element])
    cut = block.count * block.element
    values, where = data[:cut].view(elements.dtype), data[cut:]
    if block.form == MASK:
        words = -(-elements.numel() // 64) * 8
        index = _nonzero(unpack_bits(where)[: elements.numel()]) if where.numel() == words else None
    else:
        index = _positions(where, GAPS[block.form])
    if index is None or len(index) != block.count or (len(index) and int(index[-1]) >= elements.numel()):
        raise WeightsError(f"a block in the form {block.form!r} does not name its {block.count} elements")
    elements[index] = values


def _positions(codes: Tensor, width: int) -> Tensor | None:
    if codes.numel() % width:
        return None
    if codes.storage_offset() % width:
        codes = codes.clone()
    gaps = codes.view(_GAP_TYPES[width]).to(torch.int64) & ((1 << (8 * width)) - 1)
    return (gaps + 1).cumsum(0) - 1


def pack_bits(flags: Tensor) -> Tensor:
    """bool[n] as bits, u8[8 ceil(n / 64)]: flag i is bit i % 8 of byte i // 8."""
    padded = torch.zeros(-(-flags.numel() // 64) * 64, dtype=torch.uint8, device=flags.device)
    padded[: flags.numel()] = flags
    return ((padded.view(torch.int64) * _PACK) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """u8[m] as bool[8 m]."""
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int64)[:, 0]
    words = torch.from_numpy(table).to(packed.device)[packed.to(torch.int32)]
    return words.view(torch.bool)


def _nonzero(flags: Tensor) -> Tensor:
    """i64[k]; numpy takes a third of torch's time for it."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero()[:, 0]
