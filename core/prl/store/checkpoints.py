"""Checkpoints that are complete or do not exist.

    checkpoints/step_000010/{trainer/..., controller/..., MANIFEST.json}

Parts are written into `step_000010.tmp`; the manifest, with size and sha256 of every file, is written there last; then
the directory is renamed. A directory without a manifest, or with a file that is not what its manifest says, is no
checkpoint: `latest` passes over it with a warning and takes the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prl import faults
from prl.errors import StoreError
from prl.rundir import RunDir
from prl.store.files import atomic_write, fsync_directory, sha256_file, store_error
from prl.types import SCHEMA_VERSION

WRITE_POINT = "checkpoint.write"
MANIFEST = "MANIFEST.json"

_NAME = re.compile(r"step_(\d+)")


class File(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """`parts` maps a part ("trainer", "controller") to its files, their names relative to the part's directory.
    `facts` is whatever resuming wants to know before it opens a part."""

    step: int
    parts: dict[str, dict[str, File]]
    facts: dict[str, Any]
    created: float
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, every file verified."""

    step: int
    path: Path
    manifest: Manifest

    def part(self, name: str) -> Path:
        return self.path / name


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def begin(self, step: int) -> Path:
        """An empty directory into which every part saves its own sub-directory.

        Raises:
            StoreError: it cannot be made.
        """
        path = self._temporary(step)
        try:
            faults.point(WRITE_POINT)
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise store_error("make", path, error) from error
        return path

    def write_part(self, step: int, part: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Save small files of a part (the controller's own). Returns their sha256 by name, for `commit`."""
        directory = self._temporary(step) / part
        try:
            for name, data in files.items():
                atomic_write(directory / name, data, point=WRITE_POINT)
        except StoreError:
            self.abandon(step)
            raise
        return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    def commit(self, step: int, parts: Mapping[str, Mapping[str, str]], facts: Mapping[str, Any]) -> Checkpoint:
        """Write the manifest and give the checkpoint its name. Every part must have acknowledged before.

        Args:
            parts: part to file name (relative to the part's directory) to sha256.

        Raises:
            StoreError: a file is missing, or the disk is full. Earlier checkpoints are intact.
        """
        final = self._run_dir.checkpoint(step)
        try:
            manifest = self._complete(step, parts, facts)
            _replace_directory(self._temporary(step), final)
        except OSError as error:
            self.abandon(step)
            raise store_error("complete", final, error) from error
        except StoreError:
            self.abandon(step)
            raise
        return Checkpoint(step, final, manifest)

    def _complete(self, step: int, parts: Mapping[str, Mapping[str, str]], facts: Mapping[str, Any]) -> Manifest:
        """Write the manifest of what was begun. Raises: OSError, StoreError."""
        temporary = self._temporary(step)
        described = {
            part: {name: File(_synced_size(temporary / part / name), digest) for name, digest in files.items()}
            for part, files in parts.items()
        }
        manifest = Manifest(step, described, dict(facts), time.time())
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        atomic_write(temporary / MANIFEST, text, point=WRITE_POINT)
        return manifest

    def replace_part(self, step: int, part: str, files: Mapping[str, str]) -> tuple[Checkpoint, Path]:
        """Complete what `begin(step)` began: one part was saved anew, the others are those of the complete checkpoint
        of this step. That one and later ones, from which a run would go on otherwise, move aside; none is removed.

        Returns:
            The new checkpoint, and the folder that has the former ones.

        Raises:
            StoreError: the former checkpoint is damaged, or the disk is full. Then nothing has changed.
        """
        former = self._run_dir.checkpoint(step)
        manifest = _checked(step, former, True)
        parts: dict[str, Mapping[str, str]] = {part: files}
        try:
            for other, named in manifest.parts.items():
                if other != part:
                    shutil.copytree(former / other, self._temporary(step) / other)
                    parts[other] = {name: file.sha256 for name, file in named.items()}
            aside = self._run_dir.path / "replaced" / time.strftime("%Y%m%d-%H%M%S")
            aside.mkdir(parents=True)
            self._complete(step, parts, manifest.facts)
            for number, path in self._directories([]):
                if number > step:
                    path.rename(aside / path.name)
            _replace_directory(self._temporary(step), former, aside / former.name)
        except OSError as error:
            self.abandon(step)
            raise store_error("replace", former, error) from error
        return Checkpoint(step, former, _checked(step, former, False)), aside

    def abandon(self, step: int) -> None:
        """Throw away what was begun; complete checkpoints are not touched."""
        shutil.rmtree(self._temporary(step), ignore_errors=True)

    def latest(self, *, verify: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint, and a warning for everything newer that is none.

        Args:
            verify: compare the sha256 of every file, not only its size.

        Raises:
            StoreError: there were complete ones, and every one of them is damaged now: starting over would throw away
                what the run had written.
        """
        warnings: list[str] = []
        damaged: list[str] = []
        for step, path in self._directories(warnings):
            try:
                return Checkpoint(step, path, _checked(step, path, verify)), warnings
            except StoreError as error:
                warnings.append(str(error))
                if (path / MANIFEST).exists():
                    damaged.append(str(error))
        if damaged:
            raise StoreError(
                f"no checkpoint of {self._run_dir.path} can be used: {'; '.join(damaged)}. Restore one of them, or "
                "start the run again with --clean"
            )
        return None, warnings

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` complete checkpoints, and leftovers older than the newest.

        Returns:
            The steps that were removed.
        """
        complete: list[int] = []
        removed: list[int] = []
        for step, path in self._directories([]):
            if len(complete) < keep:
                with contextlib.suppress(StoreError):
                    _checked(step, path, digests=False)
                    complete.append(step)
                    continue
            if complete and step < complete[0]:
                shutil.rmtree(path, ignore_errors=True)
                removed.append(step)
        if complete:
            for path in self._run_dir.checkpoints.glob("step_*.*"):
                found = _NAME.match(path.name)
                if found and int(found[1]) <= complete[0]:
                    shutil.rmtree(path, ignore_errors=True)
        return removed

    def _temporary(self, step: int) -> Path:
        return self._run_dir.checkpoint(step).with_suffix(".tmp")

    def _directories(self, warnings: list[str]) -> list[tuple[int, Path]]:
        """Step directories, newest first. Of a step that was being replaced when the host died, the old one counts."""
        found: dict[int, Path] = {}
        if not self._run_dir.checkpoints.is_dir():
            return []
        for path in sorted(self._run_dir.checkpoints.iterdir()):
            name = path.name.removesuffix(".old")
            match = _NAME.fullmatch(name)
            if match and path.is_dir():
                found.setdefault(int(match[1]), path)
            elif path.suffix == ".tmp":
                warnings.append(f"{path} was never completed: it is ignored")
            else:
                warnings.append(f"{path} is not the directory of a step: it is ignored")
        return sorted(found.items(), reverse=True)


def _checked(step: int, path: Path, digests: bool) -> Manifest:
    """The manifest, if every file is what it says. Raises StoreError with what is wrong."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise StoreError(f"{path} has no {MANIFEST}, so it was never completed: it is ignored") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path / MANIFEST} is damaged ({error}): the checkpoint is ignored") from error
    if manifest.schema_version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {manifest.schema_version}, newer than this package's {SCHEMA_VERSION}: "
            "it is ignored; upgrade prl to use it"
        )
    if manifest.step != step:
        raise StoreError(f"{path} holds the checkpoint of step {manifest.step}, not {step}: it is ignored")
    for part, files in manifest.parts.items():
        for name, file in files.items():
            _check_file(path / part / name, file, digests)
    return manifest


def _check_file(path: Path, expected: File, digests: bool) -> None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise StoreError(f"{path} has {size} bytes of {expected.size}: its checkpoint is ignored")
        if digests and sha256_file(path) != expected.sha256:
            raise StoreError(f"{path} does not have the sha256 of its manifest: its checkpoint is ignored")
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}): its checkpoint is ignored") from error


def _synced_size(path: Path) -> int:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _replace_directory(source: Path, target: Path, keep: Path | None = None) -> None:
    """Rename; an existing target steps aside first, under a name that `latest` still finds, and is then removed, or
    gets the name `keep`."""
    aside = target.with_suffix(".old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    source.rename(target)
    fsync_directory(target.parent)
    if keep is None:
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(keep)
