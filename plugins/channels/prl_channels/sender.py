"""The trainer's half of every channel.

A version is encoded part by part, each given to the transport as it is ready; then the manifest is written and gets
its name. Nothing is ever dropped but what `release` names (every reader has acknowledged it) and what a dead sender
left: the half written at once, the whole ones with the first release, since by then every reader holds something of
this sender. What is released while a version that is not yet released builds on it stays as its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from prl import faults
from prl.errors import StoreError
from prl.messages import WeightsRef
from prl.protocols import Adapter, Probe
from prl_channels import layout
from prl_channels.config import ChannelConfig
from prl_channels.encoding import full
from prl_channels.encoding.chain import Chain
from prl_channels.manifest import SCHEMA, Base, Manifest, Part, Segment, TensorEntry, digest_of
from prl_channels.shelf import Shelf
from prl_channels.transports.base import Outlet


@dataclass
class _Sent:
    """A version that is still there. `base` is the number of the one it builds on."""

    segments: list[Segment]
    base: int | None
    released: bool = False


class Sender:
    """Writes manifests into `directory`. One sender at a time."""

    def __init__(self, directory: Path, config: ChannelConfig, outlet: Outlet) -> None:
        self._config = config
        self._outlet = outlet
        self._shelf = Shelf(directory, fsync=getattr(config, "fsync", False))
        self._chain = Chain(config) if config.encoding == "delta" else None
        self._sent: dict[int, _Sent] = {}
        if "nonce" in outlet.origin():
            self._shelf.directory.chmod(0o700)  # whoever reads a manifest may have the weights

    def send(
        self,
        version: int,
        incarnation: int,
        tensors: Iterable[tuple[str, Tensor]],
        probes: Sequence[Probe],
        tolerance: float,
        adapter: Adapter | None = None,
    ) -> WeightsRef:
        """Raises:
        StoreError: there is no room (disk full); nothing of this version is visible then.
        WeightsError: two tensors have one name, or one cannot be represented.
        """
        segments: list[Segment] = []
        try:
            parts, entries = self._encode(version, incarnation, tensors, segments)
            faults.point("channel.send")
            base = None if self._chain is None else self._chain.base
            digest = "" if self._chain is None else digest_of(parts, entries)
            about = (SCHEMA, self._outlet.name, version, incarnation, self._outlet.origin())
            manifest = Manifest(*about, parts, entries, list(probes), tolerance, adapter, digest, base)
            self._outlet.settle()
            self._shelf.commit(manifest)
        except BaseException as error:
            self._take_back(version, segments)
            if isinstance(error, OSError):
                raise StoreError(
                    f"cannot write weights of version {version} to {self._shelf.path(version)}: {error}; free space or "
                    "set runs_dir to a larger disk, then resume"
                ) from error
            raise
        location = str(self._shelf.path(version))
        if version in self._sent:  # of an incarnation that was given up
            self._outlet.drop(self._sent[version].segments)
        self._sent[version] = _Sent(segments, None if base is None else base.version)
        if self._chain is not None:
            self._chain.finish(Base(version, incarnation, digest, location), len(parts))
        return WeightsRef(version, incarnation, location, manifest.num_bytes, adapter is not None)

    def release(self, versions: Sequence[int]) -> None:
        for version in versions:
            sent = self._sent.get(version)
            if sent is None:
                self._shelf.remove(version)
            elif not sent.released:
                sent.released = True
                self._shelf.hide(version)
        self._shelf.remove_inherited()
        self._clear()

    def close(self) -> None:
        """Give back what is not on a disk. The versions cannot be read any more."""
        self._outlet.close()

    def _encode(
        self, version: int, incarnation: int, tensors: Iterable[tuple[str, Tensor]], segments: list[Segment]
    ) -> tuple[list[Part], dict[str, TensorEntry]]:
        draft = self._shelf.draft(version)
        if self._chain is not None:
            self._chain.start(version, incarnation)
        parts: list[Part] = []
        entries: dict[str, TensorEntry] = {}
        for gathered, places in layout.gather(tensors, self._config.shard_bytes, self._outlet.device):
            index = len(parts)
            encoded = full.encode(gathered) if self._chain is None else self._chain.encode(index, gathered)
            segment = None
            if encoded.blocks:
                faults.point("channel.segment")
                segment = self._outlet.put(draft, index, encoded)
                segments.append(segment)
            parts.append(encoded.part(segment))
            entries.update(places)
        return parts, entries

    def _take_back(self, version: int, segments: Sequence[Segment]) -> None:
        self._shelf.discard(version)
        self._outlet.drop(segments)
        if self._chain is not None:
            self._chain.forget()

    def _clear(self) -> None:
        """Drop what is released and carries nothing that is not."""
        needed: set[int] = set()
        for version, sent in self._sent.items():
            if not sent.released:
                at: int | None = version
                while at is not None and at not in needed:
                    needed.add(at)
                    at = self._sent[at].base if at in self._sent else None
        for version in [version for version in self._sent if version not in needed]:
            self._outlet.drop(self._sent.pop(version).segments)
            self._shelf.remove(version)
        if self._chain is not None and not needed:
            self._chain.forget()
