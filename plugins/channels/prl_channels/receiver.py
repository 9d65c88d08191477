"""The engine's half of every channel. It trusts nothing that it did not check.

The manifest must be of the version and incarnation that was announced, every segment of its size and checksum, every
tensor inside its part. Changes are applied to a copy of the very version they were made against, told by its digest;
the result must have the checksum of what was sent. A receiver that has not got that version, or whose copy is not what
it was, reads the last full one and what followed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prl import faults
from prl.messages import WeightsRef
from prl.protocols import ReceivedWeights
from prl_channels import layout
from prl_channels import manifest as manifests
from prl_channels.config import ChannelConfig
from prl_channels.encoding.decode import OtherBaseError, decode
from prl_channels.manifest import Base, Manifest
from prl_channels.patience import NotYetError, patiently
from prl_channels.shelf import BASE, MANIFEST
from prl_channels.transports.base import Inlet


@dataclass
class _Held:
    """The last version that was received, for the changes that follow."""

    digest: str
    contents: Sequence[Tensor]


class Receiver:
    """Reads what a `WeightsRef` names. The tensors lie where the transport has them: mapped memory or files, or a GPU.
    They stay valid as long as they are held and at least until the version's release; drop them before you acknowledge
    a newer one. With `encoding = "delta"` the receiver keeps the last version's for itself: do not change them."""

    def __init__(self, config: ChannelConfig, inlet: Inlet) -> None:
        self._config = config
        self._inlet = inlet
        self._held: _Held | None = None
        self._lock = threading.Lock()

    def receive(self, weights: WeightsRef) -> ReceivedWeights:
        """Blocks while it reads, and at most `visibility_s` for files to appear.

        Raises:
            WeightsError: saying what is wrong, what it is and what was expected.
        """
        faults.point("channel.receive")
        deadline = time.monotonic() + self._config.visibility_s
        with self._lock:
            manifest = patiently(lambda: _announced(weights), deadline)
            try:
                contents = self._read(manifest, Path(weights.location), self._held, deadline)
            except OtherBaseError:
                self._held, before = None, self._held
                if before is None:
                    raise
                contents = self._read(manifest, Path(weights.location), None, deadline)
            if manifest.digest:
                self._held = _Held(manifest.digest, contents)
        tensors = layout.tensors_of(manifest, contents)
        return ReceivedWeights(tensors, manifest.probes, manifest.tolerance, manifest.adapter)

    def _read(self, manifest: Manifest, directory: Path, held: _Held | None, deadline: float) -> Sequence[Tensor]:
        """The bytes of all parts: from the newest version that is held or full, by the changes since."""
        chain = [(manifest, directory)]
        while (base := chain[-1][0].base) is not None and (held is None or held.digest != base.digest):
            found = patiently(lambda base=base: _based_on(base), deadline)  # type: ignore[misc]
            chain.append((found, Path(base.location)))
        contents = held.contents if base is not None and held is not None else None
        owned: set[int] = set()
        for step, where in reversed(chain):
            segments = self._inlet.get(where, step, deadline)
            contents = decode(step, segments, contents, owned)
        assert contents is not None
        return contents


def _announced(weights: WeightsRef) -> Manifest:
    path = Path(weights.location) / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotYetError(
            f"{path}: cannot read the manifest of version {weights.version} ({error.strerror}): it was released, or "
            "this machine does not see the trainer's directory"
        ) from error
    manifest = manifests.parse(content, path)
    announced = (weights.version, weights.incarnation)
    if (manifest.version, manifest.incarnation) != announced:
        raise NotYetError(
            f"{path}: holds version {manifest.version} of incarnation {manifest.incarnation}, announced was version "
            f"{weights.version} of incarnation {weights.incarnation}"
        )
    return manifest


def _based_on(base: Base) -> Manifest:
    """The manifest of a version that another one changes; it may have been released."""
    for name in (MANIFEST, BASE):
        path = Path(base.location) / name
        try:
            manifest = manifests.parse(path.read_bytes(), path)
        except OSError:
            continue
        if manifest.digest != base.digest or manifest.incarnation != base.incarnation:
            raise NotYetError(f"{path}: is not the version {base.version} that the changes were made against")
        return manifest
    raise NotYetError(f"{base.location}: cannot read the manifest of version {base.version}, which later ones change")
