"""Which process holds the weights. Its memory is found by its number, which means something on one host only, in one
process namespace, and only as long as it lives."""

from __future__ import annotations

import os
from pathlib import Path

from prl.errors import WeightsError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def own() -> dict[str, str]:
    """Of this process."""
    return {
        "host": _boot_id(),
        "namespace": _namespace(),
        "pid": str(os.getpid()),
        "started": _started(os.getpid()) or "",
    }


def process_of(origin: dict[str, str], use_instead: str) -> int:
    """Its number, if it is alive and visible from here.

    Args:
        use_instead: the remedy, for the error's text.

    Raises:
        WeightsError: saying why not.
    """
    pid = origin.get("pid", "")
    if not pid.isdecimal():
        raise WeightsError(f"the manifest names no process of the trainer: {origin}")
    if origin.get("host") != _boot_id():
        raise WeightsError(
            f"the weights are in memory of process {pid} on another host, which cannot be seen from here: {use_instead}"
        )
    if origin.get("namespace") != _namespace():
        raise WeightsError(
            f"the weights are in memory of process {pid} in another container (process namespace "
            f"{origin.get('namespace')}, here {_namespace()}): run both in one, or {use_instead}"
        )
    if _started(int(pid)) != origin.get("started"):
        raise WeightsError(f"the weights were in memory of process {pid}, which has ended: they have to be sent again")
    return int(pid)


def _boot_id() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Clock ticks after boot at which the process began: a number that is used again belongs to another time."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
