"""One replica of a role over all its starts, and which GPUs another one could have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prl.plan import ProcessState, Role
from prl_launchers.process import Child


@dataclass(eq=False)
class Slot:
    """`gpus` is what it sees as CUDA_VISIBLE_DEVICES; None leaves that alone. One that is `leaving` was told to end
    because it is no longer wanted, and is killed at `kill_at`."""

    role: Role
    replica: int
    gpus: list[str] | None = None
    child: Child | None = None
    state: Literal["running", "restarting", "ended"] = "running"
    restarts: int = 0
    code: int | None = None
    restart_at: float = 0.0
    leaving: bool = False
    kill_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.role.name}-{self.replica}"

    def view(self) -> ProcessState:
        pid = self.child.pid if self.child is not None else 0
        return ProcessState(self.role.name, self.replica, pid, self.state, self.restarts, self.code)


class NoGpuError(Exception):
    """There is none for another replica; the message says what there is."""


def missing(role: Role, replicas: int, slots: Sequence[Slot], available: Sequence[str]) -> list[Slot]:
    """Slots for the replicas of a role that are not there; nothing is started. One that is just ending counts as there.

    Raises:
        NoGpuError: there is no GPU for one of them.
    """
    there = {slot.replica for slot in slots if slot.role is role and slot.state != "ended"}
    added: list[Slot] = []
    for replica in range(replicas):
        if replica not in there:
            added.append(Slot(role, replica, _gpus_for_another(role, [*slots, *added], available)))
    return added


def _gpus_for_another(role: Role, slots: Iterable[Slot], available: Sequence[str]) -> list[str] | None:
    """GPUs of one more replica of a role: free ones; where the run shares them already, those with the fewest users.

    Raises:
        NoGpuError: all are taken, and none is shared.
    """
    wanted = min(role.resources.gpus, len(available))
    if not wanted:
        return None
    users = Counter(gpu for slot in slots if slot.state != "ended" for gpu in slot.gpus or ())
    free = [gpu for gpu in available if not users[gpu]]
    if len(free) >= wanted:
        return free[:wanted]
    if max(users.values(), default=0) > 1:
        return sorted(available, key=lambda gpu: users[gpu])[:wanted]
    raise NoGpuError(
        f"each takes {wanted} GPU{'s' * (wanted > 1)}, and {len(free)} of {len(available)} are free: fewer replicas, "
        "or a machine with more"
    )
