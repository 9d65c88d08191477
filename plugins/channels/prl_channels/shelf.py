"""The directory of versions: `v_000012/` with its manifest, and whatever files its transport keeps there.

A version is made in `v_000012.tmp/` and renamed, so that the name is there only when everything under it is. A
version that is released while another one still builds on it loses its name as a version: `manifest.json` becomes
`base.json`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from prl import faults
from prl_channels import manifest as manifests
from prl_channels.manifest import Manifest

MANIFEST = "manifest.json"
BASE = "base.json"


class Shelf:
    """The sender's side. One sender at a time: what an earlier one left half written is removed at once."""

    def __init__(self, directory: Path, *, fsync: bool = False) -> None:
        self.directory = Path(directory).resolve()
        self._fsync = fsync
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob("v_*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        self._inherited = set(self.directory.glob("v_*"))

    def path(self, version: int) -> Path:
        return self.directory / f"v_{version:06d}"

    def draft(self, version: int) -> Path:
        """An empty directory for a version in the making."""
        draft = self.path(version).with_suffix(".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return draft

    def discard(self, version: int) -> None:
        shutil.rmtree(self.path(version).with_suffix(".tmp"), ignore_errors=True)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest of a draft and give it its name, in place of a former version of that number."""
        final = self.path(manifest.version)
        draft = final.with_suffix(".tmp")
        written = draft / MANIFEST
        written.write_bytes(manifests.encode(manifest))
        if self._fsync:
            fsync(written)
            fsync(draft)
        faults.point("channel.commit")
        self.remove(manifest.version)
        draft.rename(final)
        if self._fsync:
            fsync(self.directory)

    def hide(self, version: int) -> None:
        """Of a version that is released, but that others build on."""
        path = self.path(version)
        (path / MANIFEST).rename(path / BASE)

    def remove(self, version: int) -> None:
        self._remove(self.path(version))

    def remove_inherited(self) -> None:
        """Versions of an earlier sender: as soon as something of this one was released, every reader has left them."""
        while self._inherited:
            self._remove(self._inherited.pop())

    def _remove(self, path: Path) -> None:
        """Renamed first, so that nobody ever sees a directory with a manifest and half of its files."""
        self._inherited.discard(path)
        leaving = path.with_suffix(".released.tmp")
        shutil.rmtree(leaving, ignore_errors=True)
        try:
            path.rename(leaving)
        except FileNotFoundError:
            return
        shutil.rmtree(leaving, ignore_errors=True)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
