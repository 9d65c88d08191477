"""The trainer's half of the filesystem channel.

It writes `v_000012.tmp/`, shard by shard, the manifest last, and renames it to `v_000012/`: the name is there only
when everything under it is. Nothing is ever deleted but what `release` names (every reader has acknowledged it) and
what a dead sender left: the half written at once, the whole ones with the first release, since by then every reader
holds something of this sender.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from prl import faults
from prl.errors import StoreError, WeightsError
from prl.messages import WeightsRef
from prl.protocols import Adapter, Probe
from prl_channels import manifest as manifests
from prl_channels import shard as shards
from prl_channels.config import FilesystemConfig
from prl_channels.manifest import FileEntry, Manifest, TensorEntry


class Sender:
    """Writes into `directory`. One sender at a time: what an earlier one left half written is removed."""

    def __init__(self, directory: Path, config: FilesystemConfig) -> None:
        self.directory = Path(directory).resolve()
        self.config = config
        self.directory.mkdir(parents=True, exist_ok=True)
        for left in self.directory.glob("v_*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        self._inherited = set(self.directory.glob("v_*"))

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
        StoreError: the directory cannot be written (disk full); nothing of this version is visible then.
        WeightsError: two tensors have one name.
        """
        final = self.directory / manifests.directory_name(version)
        temporary = final.with_suffix(".tmp")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            files, entries = self._write_shards(temporary, tensors)
            faults.point("channel.send")
            content = Manifest(manifests.SCHEMA, version, incarnation, files, entries, list(probes), tolerance, adapter)
            written = manifests.write(content, temporary)
            if self.config.fsync:
                _fsync(written)
                _fsync(temporary)
            self._remove(final)
            temporary.rename(final)
            self._inherited.discard(final)
            if self.config.fsync:
                _fsync(self.directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StoreError(
                f"cannot write weights of version {version} to {temporary}: {error}; free space or set runs_dir to a "
                "larger disk, then resume"
            ) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        num_bytes = sum(entry.bytes for entry in files.values())
        return WeightsRef(version, incarnation, str(final), num_bytes, adapter is not None)

    def release(self, versions: Sequence[int]) -> None:
        for version in versions:
            self._remove(self.directory / manifests.directory_name(version))
        while self._inherited:
            self._remove(self._inherited.pop())

    def _remove(self, path: Path) -> None:
        """Renamed first, so that nobody ever sees a directory with a manifest and half of its files."""
        leaving = path.with_suffix(".released.tmp")
        shutil.rmtree(leaving, ignore_errors=True)
        try:
            path.rename(leaving)
        except FileNotFoundError:
            return
        shutil.rmtree(leaving, ignore_errors=True)

    def _write_shards(
        self, directory: Path, tensors: Iterable[tuple[str, Tensor]]
    ) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
        files: dict[str, FileEntry] = {}
        entries: dict[str, TensorEntry] = {}
        for index, shard in enumerate(_shards(tensors, self.config.shard_bytes)):
            path = directory / f"{index:05d}.safetensors"
            for name, tensor in shard:
                if name in entries:
                    raise WeightsError(f"two tensors are called {name!r}: an engine could only install one of them")
                entries[name] = TensorEntry(path.name, manifests.dtype_name(tensor), tuple(tensor.shape))
            files[path.name] = shards.write(path, shard, fsync=self.config.fsync)
        return files, entries


def _shards(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors on the CPU, in groups of at most `limit` bytes. Each is copied as it comes: the next one may use its
    memory (a gathered parameter's buffer), and tied tensors must not share any in a file."""
    shard: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
        size += tensor.nbytes
    if shard:
        yield shard


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
