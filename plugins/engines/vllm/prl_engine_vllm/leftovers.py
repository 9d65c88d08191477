"""What a killed vLLM would leave in /dev/shm.

Its processes share ring buffers (psm_*, tens of megabytes) and semaphores (sem.mp-*). Python's resource tracker, one
process for all of them, removes what is registered with it when the last of them has ended, however that came about.
But it is of their process group, which a launcher kills as a whole. And shards on a CPU share memory that vLLM's own
code makes (vllm_dist_*), registers nowhere and leaves behind in any case; its names have a ":", which the tracker does
not take. They are noted in a file, and the tracker's process removes them after what is its own.
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


def outlive_the_group(notes: Path) -> None:
    """Start the tracker in a session of its own, before anything else does. It ends by itself, after the last process
    that may register something; what it removes then is no reason for a warning. Then it removes what is in `notes`."""
    notes.parent.mkdir(parents=True, exist_ok=True)
    last = f"from prl_engine_vllm import leftovers; leftovers.remove({str(notes)!r})"
    spawn = util.spawnv_passfds

    def in_its_own_session(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        python, *options, code = args
        quiet = [python, "-W", "ignore::UserWarning", *options, f"import os; os.setsid(); {code}; {last}"]
        return spawn(path, quiet, passfds)

    util.spawnv_passfds = in_its_own_session
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def note_what_vllm_made(notes: Path) -> None:
    """Once its processes are there, which are all of this one's group."""
    names: set[str] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(folder.name)) == os.getpgrp():
                    names |= in_shared_memory(folder / "maps")
    if names:
        notes.write_text("\n".join(sorted(names)))


def remove(notes: str) -> None:
    """What is noted, and the notes."""
    file = Path(notes)
    if file.exists():
        for name in file.read_text().split("\n"):
            (SHARED / name).unlink(missing_ok=True)
        file.unlink()


def in_shared_memory(maps: Path) -> set[str]:
    """Of what a process has mapped, as `/proc/PID/maps` tells it, the names in /dev/shm that are registered nowhere."""
    paths = [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()]
    mark = str(SHARED / UNREGISTERED)
    return {Path(path).name for path in paths if path.startswith(mark) and not path.endswith(" (deleted)")}
