"""The Plan: what a run consists of. Every launcher executes or renders the same one."""

from __future__ import annotations

from typing import Literal

import msgspec

Restart = Literal["never", "on_failure"]
Purpose = Literal["main", "service"]


class Resources(msgspec.Struct, frozen=True):
    """Per replica. `threads` limits numeric libraries; 0 leaves it to them."""

    gpus: int = 0
    threads: int = 0


class Role(msgspec.Struct, frozen=True):
    """A kind of process.

    Args:
        name: "controller", "gateway", "engine", "trainer", or "env-<name>".
        command: argv; "{run_dir}" and "{replica}" are replaced.
        purpose: the run is over when every "main" role has ended well; a "service" is stopped then, and
            one that ends before, even with exit code 0, has failed.
        restart: whether a failure is repaired by starting it again, at most `max_restarts` times.
    """

    name: str
    command: tuple[str, ...]
    replicas: int = 1
    env: dict[str, str] = {}
    resources: Resources = Resources()
    purpose: Purpose = "service"
    restart: Restart = "never"
    max_restarts: int = 3


class Plan(msgspec.Struct, frozen=True):
    run_id: str
    run_dir: str
    roles: tuple[Role, ...]

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)
