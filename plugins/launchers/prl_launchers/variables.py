"""What a child process finds in its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prl.errors import EnvironmentNotFit
from prl.plan import SAFE_VARIABLES, Plan, Role

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)


def environment(role: Role, gpus: Sequence[str] | None, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of one process of a role.

    Args:
        gpus: what it sees as CUDA_VISIBLE_DEVICES; None leaves that alone.
        inherited: the launcher's own environment, of which a `clean_env` role gets `SAFE_VARIABLES` only.
    """
    variables = {name: value for name, value in inherited.items() if not role.clean_env or name in SAFE_VARIABLES}
    variables["PYTHONUNBUFFERED"] = "1"
    if role.resources.threads:
        variables |= dict.fromkeys(THREAD_VARIABLES, str(role.resources.threads))
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables | role.env


def visible_gpus(inherited: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The NVIDIA GPUs this launcher may give away, as CUDA names them."""
    chosen = inherited.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return [str(index) for index in range(sum(path.name[6:].isdigit() for path in devices.glob("nvidia[0-9]*")))]


def assign_gpus(plan: Plan, available: Sequence[str]) -> dict[tuple[str, int], list[str] | None]:
    """GPUs of every (role, replica), handed out in the plan's order. Where there are too few they are shared, round
    robin: on a machine with one GPU, engine and trainer both use it. Without any, every role is left on the CPU.

    Raises:
        EnvironmentNotFit: one replica alone would use more than there are.
    """
    assigned: dict[tuple[str, int], list[str] | None] = {}
    position = 0
    for role in plan.roles:
        wanted = role.resources.gpus if available else 0
        if wanted > len(available):
            raise EnvironmentNotFit(
                f"{role.name} takes {wanted} GPUs for each replica, and this machine has {len(available)}: configure "
                "it for fewer (trainer.processes, the engine's parallel sizes), or use a machine with more"
            )
        for replica in range(role.replicas):
            if not wanted:
                assigned[role.name, replica] = None
                continue
            assigned[role.name, replica] = [available[(position + i) % len(available)] for i in range(wanted)]
            position += wanted
    return assigned


def shared_gpus(assigned: Mapping[tuple[str, int], Sequence[str] | None]) -> list[str]:
    """A line for each GPU that several processes have: its memory is theirs to divide."""
    users: dict[str, list[str]] = {}
    for (role, replica), gpus in assigned.items():
        for gpu in gpus or ():
            users.setdefault(gpu, []).append(f"{role}-{replica}")
    return [f"GPU {gpu} is shared by {' and '.join(names)}" for gpu, names in users.items() if len(names) > 1]
