"""What a launcher and the controller say to one another; `prl.messages` has all the rest."""

from __future__ import annotations

import msgspec

from prl.messages import Method, Nothing


class RoleExited(msgspec.Struct):
    """The launcher saw a process end, at once. `code` is its exit code, negative for a signal.

    `will_restart` is what the launcher does next if the role is still needed.
    """

    role: str
    replica: int
    code: int
    will_restart: bool


class StillNeeded(msgspec.Struct):
    """Whether the run still needs the role. If so its end was a failure, even with code 0. `why` is given where the
    controller ended it itself."""

    needed: bool
    why: str = ""


class LauncherHello(msgspec.Struct):
    """A launcher that can change how many processes a role has while the run goes on. It says so over a connection that
    stays; the controller calls `SCALE` over it."""

    roles: list[str]
    """Those whose number it can change."""


ROLE_EXITED = Method("role_exited", RoleExited, StillNeeded)
LAUNCHER = Method("launcher", LauncherHello, Nothing)


class ScaleRole(msgspec.Struct):
    """From now on a role has the replicas 0 to `replicas` - 1: those that are missing are started, those above are
    stopped, which is no failure. Asking for what is there already changes nothing."""

    role: str
    replicas: int


class Scaled(msgspec.Struct):
    """`refused` is why it cannot be done, and then nothing was changed; empty when it is under way."""

    refused: str = ""


SCALE = Method("scale", ScaleRole, Scaled)
