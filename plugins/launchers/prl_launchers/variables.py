"""What a child process finds in its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prl.errors import EnvironmentNotFit
from prl.plan import ENGINE, SAFE_VARIABLES, TRAINER, Plan, Role

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
        EnvironmentNotFit: one replica alone would use more than there are, or too few for what the plan needs.
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
    if plan.gpus != "optional":
        _refuse_without_gpus(plan, assigned)
    return assigned


def _refuse_without_gpus(plan: Plan, assigned: Mapping[tuple[str, int], Sequence[str] | None]) -> None:
    sides = {name: {key: gpus for key, gpus in assigned.items() if key[0] == name} for name in (ENGINE, TRAINER)}
    lacking = [f"{role}-{replica}" for side in sides.values() for (role, replica), gpus in side.items() if not gpus]
    if lacking:
        raise EnvironmentNotFit(
            f"{plan.gpus_for} carries weights from GPU to GPU, and there is none for {' and '.join(lacking)}: use "
            'channel "shm" or "filesystem", or a machine with an NVIDIA GPU'
        )
    owned, taken = ({gpu for gpus in side.values() for gpu in gpus or ()} for side in sides.values())
    if plan.gpus == "apart" and owned & taken:
        raise EnvironmentNotFit(
            f"{plan.gpus_for} needs GPUs of the engines' own, and GPU {', '.join(sorted(owned & taken))} would be the "
            'trainer\'s too: use channel "cuda_ipc", fewer engines or trainer processes, or a machine with more GPUs'
        )


def shared_gpus(assigned: Mapping[tuple[str, int], Sequence[str] | None]) -> list[str]:
    """A line for each GPU that several processes have: its memory is theirs to divide."""
    users: dict[str, list[str]] = {}
    for (role, replica), gpus in assigned.items():
        for gpu in gpus or ():
            users.setdefault(gpu, []).append(f"{role}-{replica}")
    return [f"GPU {gpu} is shared by {' and '.join(names)}" for gpu, names in users.items() if len(names) > 1]
