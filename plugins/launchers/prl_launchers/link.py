"""The launcher's connection to the controller: it reports at once which process ended, and hears how many it wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from prl.errors import PrlError
from prl.launching import LAUNCHER, ROLE_EXITED, SCALE, LauncherHello, RoleExited, Scaled, ScaleRole, StillNeeded
from prl.rundir import RunDir
from prl.wire import Client, Peer

TIMEOUT_S = 2.0


class ControllerLink:
    """Connects when there is a controller: it may not have started, or a run may have none.

    Args:
        roles: those whose number this launcher can change.
        scale: does it, and answers at once.
    """

    def __init__(self, run_dir: RunDir, roles: Sequence[str], scale: Callable[[ScaleRole], Scaled]) -> None:
        self._run_dir = run_dir
        self._roles = list(roles)
        self._scale = scale
        self._client: Client | None = None
        self._introduced: Client | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._next = 0.0

    def keep(self) -> None:
        """Introduce this launcher to a controller that has not been told yet. Call it often; it costs nothing."""
        under_way = self._greeting is not None and not self._greeting.done()
        told = self._introduced is not None and self._introduced is self._client and not self._introduced.peer.closed
        if self._roles and not told and not under_way and time.monotonic() >= self._next:
            self._next = time.monotonic() + TIMEOUT_S
            if self._run_dir.socket.exists():
                self._greeting = asyncio.get_running_loop().create_task(self._greet())

    async def still_needed(self, event: RoleExited) -> StillNeeded | None:
        """Tell the controller; its answer, or None when there is none to be had."""
        try:
            client = self._connect()
            return await client.call(ROLE_EXITED, event, timeout=TIMEOUT_S)
        except (PrlError, OSError):
            return None

    def close(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _greet(self) -> None:
        try:
            client = self._connect()
            await client.call(LAUNCHER, LauncherHello(self._roles), timeout=TIMEOUT_S)
            self._introduced = client
        except (PrlError, OSError):
            return  # it is starting or ending; `keep` tries again

    def _connect(self) -> Client:
        if self._client is None or self._client.peer.closed:
            if self._client is not None:
                self._client.close()
            address = self._run_dir.socket.read_text().strip()
            token = self._run_dir.token.read_text().strip()
            self._client = Client(address, token, {SCALE: self._on_scale}, name="controller")
        return self._client

    def _on_scale(self, peer: Peer, request: ScaleRole) -> Scaled:
        return self._scale(request)
