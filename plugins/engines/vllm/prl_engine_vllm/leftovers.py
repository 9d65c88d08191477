"""What a killed vLLM would leave in /dev/shm.

Its processes share ring buffers (psm_*, 64 MiB and more each where messages are that large) and semaphores (sem.mp-*).
Python's resource tracker, one process for all of them, removes what is registered when the last of them has ended,
however that came about. But it is of their process group, which the launcher kills as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from typing import Any


def outlive_the_group() -> None:
    """Start the tracker in a session of its own, before anything else does. It ends by itself, after the last process
    that may register something."""
    spawn = util.spawnv_passfds

    def in_its_own_session(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        return spawn(path, [*args[:-1], f"import os; os.setsid(); {args[-1]}"], passfds)

    util.spawnv_passfds = in_its_own_session
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = spawn
