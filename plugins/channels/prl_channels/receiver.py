"""The engine's half of the filesystem channel. It trusts nothing that it did not check.

The manifest must be of the version and incarnation that was announced, every file of its size and sha256, every
tensor of its name, dtype and shape. On a network file system the announcement can overtake the files (NFS caches
directory entries and attributes for seconds), so what is missing, short or different is looked at again, briefly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from prl import faults
from prl.errors import WeightsError
from prl.messages import WeightsRef
from prl.protocols import ReceivedWeights
from prl.store.files import sha256_file
from prl_channels import manifest as manifests
from prl_channels.config import FilesystemConfig
from prl_channels.manifest import Manifest

T = TypeVar("T")

FIRST_RETRY_S = 0.02
"""Pause before the first second look; it doubles each time."""


class Receiver:
    """Reads what a `WeightsRef` names. The tensors are on the CPU and mapped from the files: copy them into the model
    before acknowledging, after which the files may go."""

    def __init__(self, config: FilesystemConfig) -> None:
        self.config = config

    def receive(self, weights: WeightsRef) -> ReceivedWeights:
        """Blocks while it reads, and at most `visibility_s` for files to appear.

        Raises:
            WeightsError: naming the file, what it is and what was expected.
        """
        faults.point("channel.receive")
        deadline = time.monotonic() + self.config.visibility_s
        directory = Path(weights.location)
        manifest = _patiently(lambda: _read_manifest(directory, weights), deadline)
        self._verify(directory, manifest, deadline)
        tensors: dict[str, Tensor] = {}
        for file in manifest.files:
            tensors.update(_load(directory, file, manifest))
        lacking = sorted(manifest.tensors.keys() - tensors.keys())
        if lacking:
            raise WeightsError(f"{directory}: no file holds {lacking[0]!r} (lacking: {len(lacking)} tensors)")
        return ReceivedWeights(tensors, manifest.probes, manifest.tolerance, manifest.adapter)

    def _verify(self, directory: Path, manifest: Manifest, deadline: float) -> None:
        def verify(file: str) -> None:
            _patiently(lambda: _check_file(directory, file, manifest), deadline)

        if len(manifest.files) <= 1:
            for file in manifest.files:
                verify(file)
            return
        with ThreadPoolExecutor(min(self.config.threads, len(manifest.files))) as pool:
            list(pool.map(verify, manifest.files))


class _NotYetError(Exception):
    """Not what was announced, which a network file system may still put right."""


def _patiently(look: Callable[[], T], deadline: float) -> T:
    pause = FIRST_RETRY_S
    while True:
        try:
            return look()
        except _NotYetError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WeightsError(str(error)) from error
        time.sleep(min(pause, left))
        pause *= 2


def _read_manifest(directory: Path, weights: WeightsRef) -> Manifest:
    path = directory / manifests.NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _NotYetError(
            f"{path}: cannot read the manifest of version {weights.version} ({error.strerror}): it was released, or "
            "this machine does not see the trainer's directory"
        ) from error
    manifest = manifests.parse(content, path)
    announced = (weights.version, weights.incarnation)
    if (manifest.version, manifest.incarnation) != announced:
        raise _NotYetError(
            f"{path}: holds version {manifest.version} of incarnation {manifest.incarnation}, announced was version "
            f"{weights.version} of incarnation {weights.incarnation}"
        )
    return manifest


def _check_file(directory: Path, file: str, manifest: Manifest) -> None:
    path, expected = directory / file, manifest.files[file]
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise _NotYetError(f"{path}: {size} bytes, the manifest says {expected.bytes}: truncated or incomplete")
        found = sha256_file(path)
    except OSError as error:
        raise _NotYetError(f"{path}: cannot be read ({error.strerror}), the manifest lists it") from error
    if found != expected.sha256:
        raise _NotYetError(
            f"{path}: corrupted: its sha256 is {found[:16]}..., the manifest says {expected.sha256[:16]}..."
        )


def _load(directory: Path, file: str, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file whose bytes were checked; what they are called and shaped is checked here."""
    path = directory / file
    try:
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                expected = manifest.tensors.get(name)
                if expected is None or expected.file != file:
                    raise WeightsError(f"{path}: holds the tensor {name!r}, which the manifest does not place there")
                tensor = opened.get_tensor(name)
                dtype, shape = manifests.dtype_name(tensor), tuple(tensor.shape)
                if (dtype, shape) != (expected.dtype, expected.shape):
                    raise WeightsError(
                        f"{path}: {name!r} is {dtype} {list(shape)}, the manifest says {expected.dtype} "
                        f"{list(expected.shape)}"
                    )
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a safetensors file: {error}") from error
