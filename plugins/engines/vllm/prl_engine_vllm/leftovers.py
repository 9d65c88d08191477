"""What a killed vLLM would leave in /dev/shm.

Its processes share ring buffers (psm_*, tens of megabytes) and semaphores (sem.mp-*). Python's resource tracker, one
process for all of them, removes what is registered with it when the last of them has ended, however that came about.
But it is of their process group, which a launcher kills as a whole. And shards on a CPU share memory that vLLM's own
code makes (vllm_dist_*) and registers nowhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

SHARED = Path("/dev/shm")
UNREGISTERED = "vllm_dist_"


def outlive_the_group() -> None:
    """Start the tracker in a session of its own, before anything else does. It ends by itself, after the last process
    that may register something; what it removes then is no reason for a warning."""
    spawn = util.spawnv_passfds

    def in_its_own_session(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        python, *options, code = args
        quiet = [python, "-W", "ignore::UserWarning", *options, f"import os; os.setsid(); {code}"]
        return spawn(path, quiet, passfds)

    util.spawnv_passfds = in_its_own_session
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def register_what_vllm_made() -> None:
    """Once its processes are there, which are all of this one's group."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == os.getpgrp():
                    for name in in_shared_memory(folder / "maps"):
                        resource_tracker.register(f"/{name}", "shared_memory")


def in_shared_memory(maps: Path) -> set[str]:
    """Of what a process has mapped, as `/proc/PID/maps` tells it, the names in /dev/shm that nobody has registered."""
    paths = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()]
    mark = str(SHARED / UNREGISTERED)
    return {Path(path).name for path in paths if path.startswith(mark) and not path.endswith(" (deleted)")}
