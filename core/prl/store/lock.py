"""`config.json` and `lock.json`: what a run was made with, so that it can be explained and repeated."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from prl.rundir import RunDir
from prl.store.files import atomic_write
from prl.types import SCHEMA_VERSION

_GROUP_PREFIX = "prl."


def write_config(run_dir: RunDir, config: Mapping[str, Any]) -> bytes:
    """Write the resolved configuration. Returns the bytes, for `write_lock`.

    With Python's own encoder: a key may be infinite, which msgspec would write as null.

    Raises:
        StoreError: it cannot be written.
    """
    data = json.dumps(config, indent=2).encode() + b"\n"
    atomic_write(run_dir.config, data)
    return data


def write_lock(
    run_dir: RunDir,
    config: bytes,
    seeds: Mapping[str, int],
    sources: Mapping[str, bytes] | None = None,
    interpreters: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Write `lock.json`.

    Args:
        config: the bytes of `config.json`.
        seeds: by what they seed.
        sources: contents of further files that the run depends on (plugins named by file, data), by name.
        interpreters: of roles that run under another Python than this: its path and the versions that matter there.
    """
    document = lock(config, seeds, sources) | {"interpreters": dict(interpreters or {})}
    atomic_write(run_dir.lock, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def lock(config: bytes, seeds: Mapping[str, int], sources: Mapping[str, bytes] | None = None) -> dict[str, Any]:
    """Versions of every installed distribution, the plugins that are registered, hashes, seeds. Imports no plugin."""
    packages: dict[str, str] = {}
    plugins: dict[str, dict[str, str]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.name
        if not name or name in packages:  # an earlier directory of sys.path wins, as it does for imports
            continue
        packages[name] = distribution.version
        for point in distribution.entry_points:
            if point.group.startswith(_GROUP_PREFIX):
                plugins[f"{point.group.removeprefix(_GROUP_PREFIX)}:{point.name}"] = {
                    "distribution": name,
                    "version": distribution.version,
                    "object": point.value,
                }
    hashes = {"config.json": hashlib.sha256(config).hexdigest()}
    hashes |= {name: hashlib.sha256(data).hexdigest() for name, data in (sources or {}).items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
        "plugins": dict(sorted(plugins.items())),
        "hashes": hashes,
        "seeds": dict(seeds),
    }
