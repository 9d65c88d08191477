"""From the segments of a version, and its base, to the bytes of its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prl.errors import WeightsError
from prl_channels.checksum import checksum
from prl_channels.encoding import delta
from prl_channels.encoding.full import RAW
from prl_channels.manifest import Manifest


class OtherBaseError(WeightsError):
    """The changes were applied and do not give what was sent: the base is not what it was."""


def decode(
    manifest: Manifest, segments: Sequence[Tensor | None], base: Sequence[Tensor] | None, owned: set[int]
) -> list[Tensor]:
    """The bytes of every part, u8[bytes]. What is sent whole is not copied.

    Args:
        segments: the verified bytes of each part's segment, u8[n].
        base: the parts of the version that this one changes.
        owned: numbers of those parts of `base` that nobody else has; here and afterwards.

    Raises:
        WeightsError: the segments do not fit the manifest.
    """
    contents: list[Tensor] = []
    for index, (part, segment) in enumerate(zip(manifest.parts, segments, strict=True)):
        if part.segment is not None and segment is not None and len(part.blocks) == 1:
            (block,) = part.blocks
            if block.form == RAW and block.bytes == part.bytes:
                contents.append(segment[part.segment.head :][block.offset : block.offset + block.size])
                owned.discard(index)
                continue
        if part.bytes == 0:
            contents.append(torch.empty(0, dtype=torch.uint8))
            continue
        if base is None or index >= len(base) or base[index].numel() != part.bytes:
            raise WeightsError(f"version {manifest.version}: the base has no part {index} of {part.bytes} bytes")
        content = base[index]
        if part.blocks and index not in owned:
            content = content.clone()
            owned.add(index)
        for block in part.blocks:
            assert part.segment is not None and segment is not None
            delta.apply(block, content, segment[part.segment.head :])
        found = checksum(content)
        if found != part.checksum:
            raise OtherBaseError(
                f"version {manifest.version}: part {index} has the checksum {found} after the changes were applied, "
                f"the manifest says {part.checksum}: the base is not what it was"
            )
        contents.append(content)
    return contents
