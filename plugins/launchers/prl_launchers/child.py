"""`python -I -S child.py PARENT_PID PROGRAM ARGUMENT...`: become PROGRAM, and die when the parent does.

PR_SET_PDEATHSIG survives exec. It is set here rather than in a preexec_fn, which may deadlock in a process that has
threads. Run as a file, so it imports nothing of this package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, program = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above could take effect
        os._exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot start {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv)
