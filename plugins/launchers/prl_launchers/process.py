"""One child process: its own session and log, and a death that is seen before its number can be reused."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prl_launchers.causes import HEADER

_WRAPPER = Path(__file__).with_name("child.py")


class Child:
    """Started on construction. Whoever sees `exit_code` calls `reap` once; until then the pid stays reserved, so that
    signals to its group cannot reach a stranger.
    """

    def __init__(self, name: str, argv: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(variables),
                start_new_session=True,
            )
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            output.write(f"{HEADER}{stamp} {name} pid {self.pid}: {' '.join(argv)}\n".encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal. Does not reap."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def reap(self) -> None:
        """End what is left of its group, then release the pid."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def signal(self, number: int) -> None:
        """To the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def pidfd(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None where the system has none."""
        try:
            return os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return None
