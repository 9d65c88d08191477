"""The Plan: what a run consists of. Every launcher executes or renders the same one."""

from __future__ import annotations

from typing import Literal

import msgspec

CONTROLLER = "controller"
"""The role that decides: a launcher asks it first to stop, and reports to it."""
ENGINE = "engine"
"""The inference servers."""
TRAINER = "trainer"
"""The process group that trains; the plan starts it as one replica."""

Restart = Literal["never", "on_failure"]
Purpose = Literal["main", "service"]
GpuNeed = Literal["optional", "required", "apart"]

SAFE_VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "HF_DATASETS_OFFLINE",
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LC_ALL",
        "LC_CTYPE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "PRL_FAULTS",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONHASHSEED",
        "PYTHONHOME",
        "PYTHONNOUSERSITE",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "REQUESTS_CA_BUNDLE",
        "SHELL",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TEMP",
        "TERM",
        "TMP",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
"""What a role with `clean_env` inherits: enough to find programs, caches and certificates, and no credential."""


class Resources(msgspec.Struct, frozen=True):
    """Per replica. `gpus` is how many it would use where there are some, 0 leaves the visible ones as they are;
    `threads` limits numeric libraries, 0 leaves it to them.
    """

    gpus: int = 0
    threads: int = 0


class Role(msgspec.Struct, frozen=True):
    """A kind of process.

    Args:
        name: "controller", "gateway", "engine", "trainer", or "env-<name>".
        command: argv; "{run_dir}" and "{replica}" are replaced.
        purpose: the run is over when every "main" role has ended well; a "service" is stopped then, and
            one that ends before, even with exit code 0, has failed.
        clean_env: start it with the variables of `SAFE_VARIABLES` and `env` only. For code that must not see the
            secrets of the shell it was started from (environments).
        restart: whether a failure is repaired by starting it again, at most `max_restarts` times.
        elastic: whether `replicas` is only where it begins, and more or fewer may be asked for while the run goes on
            (`prl.launching.SCALE`).
    """

    name: str
    command: tuple[str, ...]
    replicas: int = 1
    env: dict[str, str] = {}
    clean_env: bool = False
    resources: Resources = Resources()
    purpose: Purpose = "service"
    restart: Restart = "never"
    max_restarts: int = 3
    elastic: bool = False


class Plan(msgspec.Struct, frozen=True):
    """
    Args:
        gpus: what trainer and engines need, since weights go from one to the other. "required": each process has a GPU,
            which both may share; "apart": no engine has one of the trainer's. A launcher refuses what it cannot give.
        gpus_for: the key that asks for it.
    """

    run_id: str
    run_dir: str
    roles: tuple[Role, ...]
    gpus: GpuNeed = "optional"
    gpus_for: str = ""

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)


class ProcessState(msgspec.Struct):
    """One process as the launcher sees it. `code` is None while it runs; negative is a signal."""

    role: str
    replica: int
    pid: int
    state: Literal["running", "restarting", "ended"]
    restarts: int = 0
    code: int | None = None


class LaunchState(msgspec.Struct):
    """What a launcher shows while it works. `cause` is the one line that names a failure."""

    phase: Literal["running", "stopping", "ended"]
    processes: list[ProcessState]
    cause: str = ""
