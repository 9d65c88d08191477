"""`python -I -S warden.py MARK`: when standard input ends, kill every process that carries MARK in its environment.

The launcher holds the other end, so this happens however the launcher ends, SIGKILL included. The mark is inherited
by children of children and survives new sessions and double forks, which process groups and PR_SET_PDEATHSIG do not.
Run as a file, so it imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

VARIABLE = "PRL_LAUNCH"
ROUNDS = 100
"""A process may fork while the others are killed, so look again until none is left; 2 s at most."""


def sweep(mark: str) -> int:
    """Kill every process with this mark, and say how many there were. Only where there is /proc (Linux)."""
    killed = 0
    for _ in range(ROUNDS):
        found = _kill_marked(f"{VARIABLE}={mark}".encode())
        killed += found
        if not found:
            break
        time.sleep(0.02)
    return killed


def _kill_marked(entry: bytes) -> int:
    found = 0
    if not os.path.isdir("/proc/self"):
        return 0
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                found += _kill_if_marked(int(name), entry)
    return found


def _kill_if_marked(pid: int, entry: bytes) -> bool:
    """The descriptor names the process itself: were its number reused in between, the signal would go nowhere."""
    descriptor = os.pidfd_open(pid)
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            marked = entry in file.read().split(b"\0")
        if marked:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return marked
    finally:
        os.close(descriptor)


def start(mark: str) -> subprocess.Popen[bytes]:
    """In a session of its own, so that no signal to the launcher's group reaches it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def finish(guard: subprocess.Popen[bytes], mark: str) -> None:
    """Have it do its work now; where it cannot, it is done here."""
    assert guard.stdin is not None
    guard.stdin.close()
    try:
        done = guard.wait(timeout=10) == 0
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()
        done = False
    if not done:
        sweep(mark)


def main(argv: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(argv[1])


if __name__ == "__main__":
    main(sys.argv)
