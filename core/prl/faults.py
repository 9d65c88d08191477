"""Seeded fault injection: a seam that every role has, silent unless a run asks for it.

A role calls `faults.install(plan, role)` once; after that its named points may kill the process, delay it, drop a
message, fail a request or refuse a write. `PRL_FAULTS`, a JSON list of `Fault`, is the plan of a process that nobody
handed one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from prl.errors import PrlError

log = logging.getLogger(__name__)

VARIABLE = "PRL_FAULTS"


@dataclass(frozen=True)
class Fault:
    """One kind of failure.

    Args:
        role: the role it happens in, or "*".
        point: the seam, such as "engine.generate" or "wire.send"; "*" is every one.
        action: kill (SIGKILL this process), delay (`seconds`), drop (a message), error (fail the request), disk_full,
            cut (every connection that others have made to this process).
        at: the n-th time the point is passed, counted from 1; 0 means by `probability`.
        only: restrict "wire.send" to one method.
        replica: restrict to one replica of the role; -1 is every one.
    """

    role: str
    point: str
    action: Literal["kill", "delay", "drop", "error", "disk_full", "cut"]
    at: int = 0
    probability: float = 0.0
    seconds: float = 0.0
    only: str = ""
    replica: int = -1


class InjectedFault(PrlError):
    """An error that fault injection asked for."""


class _Active:
    def __init__(self, plan: Sequence[Fault], role: str, replica: int, seed: int) -> None:
        self.faults = [f for f in plan if f.role in ("*", role) and f.replica in (-1, replica)]
        self.counts = [0] * len(self.faults)
        self.random = random.Random(f"{seed}/{role}/{replica}")

    def due(self, point: str, only: str) -> Fault | None:
        for index, fault in enumerate(self.faults):
            if fault.point not in ("*", point) or (fault.only and fault.only != only):
                continue
            self.counts[index] += 1
            if self.counts[index] == fault.at or (fault.at == 0 and self.random.random() < fault.probability):
                log.warning("fault injection: %s at %s", fault.action, point)
                return fault
        return None


_active: _Active | None = None


def install(role: str, replica: int = 0, *, seed: int = 0, plan: Sequence[Fault] | None = None) -> None:
    """Arm this process. Without `plan`, `PRL_FAULTS` decides; without either, nothing ever happens."""
    global _active
    if plan is None:
        text = os.environ.get(VARIABLE)
        plan = msgspec.json.decode(text, type=list[Fault]) if text else []
    active = _Active(plan, role, replica, seed)
    _active = active if active.faults else None


def point(name: str) -> None:
    """Pass a seam. May not return (kill), may sleep, may raise `InjectedFault` or OSError(ENOSPC)."""
    if _active is None:
        return
    fault = _active.due(name, "")
    if fault is None:
        return
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "error":
        raise InjectedFault(f"fault injection failed {name}")
    elif fault.action == "disk_full":
        raise OSError(errno.ENOSPC, "No space left on device (fault injection)")
    elif fault.action == "cut":
        cut_connections()


def drops(name: str, only: str) -> bool:
    """Whether the message that is about to be sent is to be lost."""
    if _active is None:
        return False
    fault = _active.due(name, only)
    if fault is None:
        return False
    if fault.action == "delay":
        time.sleep(fault.seconds)
    return fault.action == "drop"


def cut_connections() -> int:
    """Shut down the TCP connections that were made to a port on which this process listens, as a network that fails
    would; how many there were. Both ends see it. Those that this process made itself stay. Linux only."""
    listening, connected = set(), []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                found.close()
            elif found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(found.getsockname()[1])
                found.close()
            else:
                connected.append(found)
    count = 0
    for found in connected:
        with found, contextlib.suppress(OSError):
            if found.getsockname()[1] in listening:
                found.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
