"""`python -m prl_trainer_fsdp.ranks N ARGUMENT...`: `python ARGUMENT...` as N ranks of one group on this machine.

In place of torchrun, whose agent listens on every interface without a password and unpickles what it finds in its
store. Here the ranks meet in a file that only this user may read, and speak over loopback. With torchrun's variables in
its environment a rank joins torchrun's group as ever (`parallel.start`).

The first rank that fails ends the others, and its exit code is the group's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType

from prl.errors import Preempted

MEETING_PLACE = "PRL_RANKS_FILE"
"""The variable that names the file in which ranks find one another."""
GRACE_S = 10.0
"""Between SIGTERM and SIGKILL for the ranks that are left."""
POLL_S = 0.05


def main(argv: Sequence[str]) -> int:
    world, command = int(argv[0]), [sys.executable, *argv[1:]]
    with tempfile.TemporaryDirectory(prefix="prl-ranks-") as folder:
        ranks = [
            subprocess.Popen(command, env=_variables(rank, world, os.path.join(folder, "store")))
            for rank in range(world)
        ]

        def forward(number: int, frame: FrameType | None) -> None:
            _signal(ranks, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        try:
            return _wait(ranks)
        finally:
            _end(ranks)


def _variables(rank: int, world: int, store: str) -> dict[str, str]:
    """Of one rank. Who wants another interface than loopback sets it."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    place = {name: str(number) for name, number in numbers.items()}
    return interfaces | dict(os.environ) | place | {MEETING_PLACE: store}


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended well or were preempted, or one has failed; its exit code, 1 for a signal."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for number, code in enumerate(codes):
            if code is not None and code < 0:
                print(f"ERROR rank {number} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
                return 1
            if code not in (None, 0, Preempted.exit_code):
                return code
        ended = [code for code in codes if code is not None]
        if len(ended) == len(ranks):
            return max(ended)
        time.sleep(POLL_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
