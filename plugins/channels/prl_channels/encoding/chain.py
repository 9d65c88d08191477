"""The sender's memory of what it sent: what the next delta is against, and when a full version is due again.

A full version begins a chain; every later one changes the one before. A reader that has lost its place reads the chain
from its beginning, so its versions stay readable as bases after their release, as long as one that is not released
builds on them.

Memory: the bytes of the last version, once, on the device where the transport compares them; while a version is
encoded one part of it more. In a host's memory for `filesystem` and `shm`, on the GPU for `cuda_ipc` and `nccl`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prl_channels.checksum import checksum
from prl_channels.config import ChannelConfig
from prl_channels.encoding import delta, full
from prl_channels.encoding.full import RAW, Encoded
from prl_channels.layout import Gathered, Place
from prl_channels.manifest import Base


@dataclass
class _Former:
    """A part of the last version."""

    places: list[Place]
    content: Tensor


class Chain:
    """`start`, `encode` of every part in turn, then `finish`; or `forget` when the version did not come about."""

    def __init__(self, config: ChannelConfig) -> None:
        self._config = config
        self.forget()

    def forget(self) -> None:
        """The next version is a full one."""
        self._head: Base | None = None
        self._parts: list[_Former] = []
        self._length = 0
        self._followed = self._full = 0
        """Bytes sent since the last full version, and of that."""

    def start(self, version: int, incarnation: int) -> None:
        """A full one is due after a rollback, too: what was sent of its past is given up."""
        head = self._head
        due = self._length >= self._config.chain_length or self._followed > self._config.chain_share * self._full
        if head is None or head.incarnation != incarnation or head.version >= version or due:
            self.forget()
        self._sent = 0
        self._whole = True

    def encode(self, index: int, gathered: Gathered) -> Encoded:
        """Part number `index`: as changes, if the last version has the same tensors there and that is shorter."""
        content = gathered.packed()
        gathered.tensors.clear()
        former = self._parts[index] if index < len(self._parts) else None
        encoded = None
        if former is not None and former.places == gathered.places:
            encoded = delta.encode(former.content, content, gathered)
            if sum(block.bytes for block in encoded.blocks if block.form == RAW) == content.numel():
                encoded = full.encode(gathered, [content], encoded.checksum)
        if encoded is None:
            encoded = full.encode(gathered, [content], checksum(content))
        self._parts[index : index + 1] = [_Former(gathered.places, content)]
        self._whole = self._whole and encoded.gathered is not None
        self._sent += encoded.payload_bytes
        return encoded

    @property
    def base(self) -> Base | None:
        """What the version that was encoded changes; None when every part of it is whole."""
        return None if self._whole else self._head

    def finish(self, head: Base, parts: int) -> None:
        """The version of so many parts was sent, and is what the next one changes."""
        if self.base is None:
            self._length, self._followed, self._full = 0, 0, self._sent
        else:
            self._length, self._followed = self._length + 1, self._followed + self._sent
        del self._parts[parts:]
        self._head = head
