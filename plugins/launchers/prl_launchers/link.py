"""The launcher's connection to the controller: it reports at once which process ended."""

from __future__ import annotations

from prl.errors import PrlError
from prl.messages import ROLE_EXITED, RoleExited
from prl.rundir import RunDir
from prl.wire import Client

TIMEOUT_S = 2.0


class ControllerLink:
    """Connects when it is first needed: the controller may not have started, or a run may have none (tests)."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._client: Client | None = None

    async def still_needed(self, event: RoleExited) -> bool | None:
        """Tell the controller; its answer, or None when there is none to be had."""
        try:
            client = self._connect()
            return (await client.call(ROLE_EXITED, event, timeout=TIMEOUT_S)).needed
        except (PrlError, OSError):
            return None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _connect(self) -> Client:
        if self._client is None or self._client.peer.closed:
            self.close()
            address = self._run_dir.socket.read_text().strip()
            token = self._run_dir.token.read_text().strip()
            self._client = Client(address, token, name="controller")
        return self._client
