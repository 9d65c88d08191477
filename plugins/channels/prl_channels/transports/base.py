"""What a transport is. The outlet keeps segments in the trainer's process or beside the manifest, the inlet gets them.

Sender and receiver do all else: encoding, manifests, chains, releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from prl_channels.encoding.full import Encoded
from prl_channels.manifest import Manifest, Segment


class Outlet(Protocol):
    """The trainer's side."""

    name: str
    device: torch.device | None
    """Where parts are gathered and compared; None leaves tensors where they are."""

    def origin(self) -> dict[str, str]:
        """What an inlet has to know of this process; part of every manifest."""
        ...

    def put(self, draft: Path, index: int, encoded: Encoded) -> Segment:
        """Keep the bytes of part `index` of a version whose directory `draft` will be renamed.

        Raises:
            OSError: there is no room.
        """
        ...

    def settle(self) -> None:
        """Every byte is where the manifest says; called before it is written."""
        ...

    def drop(self, segments: Sequence[Segment]) -> None:
        """These are not needed any more, or their version did not come about. Each is dropped once."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """The engine's side. What it returns stays valid as long as a tensor on it is held, at least until the version's
    release; it is verified."""

    def get(self, directory: Path, manifest: Manifest, deadline: float) -> Sequence[Tensor | None]:
        """The bytes of the segment of every part, u8[n]; None where it has none.

        Args:
            deadline: in `time.monotonic()` seconds; what may still appear is waited for until then.

        Raises:
            WeightsError: bytes are missing, or not what the manifest says. FileNotFoundError: they are not there.
        """
        ...
