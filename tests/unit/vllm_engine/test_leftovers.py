"""Shared memory of a process group that is killed as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from prl_engine_vllm.leftovers import SHARED, in_shared_memory

PROCESS = """
import mmap, os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from prl_engine_vllm import leftovers
notes = Path(sys.argv[1])
leftovers.outlive_the_group(notes)
tracker = resource_tracker._resource_tracker._pid
while os.getsid(tracker) != tracker:  # it starts
    time.sleep(0.01)
held = SharedMemory(create=True, size=4096)
foreign = Path("/dev/shm/vllm_dist_of_a_test:%d" % os.getpid())
foreign.write_bytes(bytes(4096))
with foreign.open("r+b") as file:
    mapped = mmap.mmap(file.fileno(), 4096)
leftovers.note_what_vllm_made(notes)
print(held._name.strip("/"), foreign.name, flush=True)
time.sleep(60)
"""


def test_what_a_killed_group_shared_is_removed_without_a_word(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(tmp_path / "engine" / "notes")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    names = process.stdout.readline().split()
    assert len(names) == 2 and all((SHARED / name).exists() for name in names), process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate(timeout=20)[1]  # the tracker has this end of the pipe too: it has ended then
    assert said == ""
    deadline = time.monotonic() + 10
    while any((SHARED / name).exists() for name in names):
        assert time.monotonic() < deadline, names
        time.sleep(0.01)
    assert not (tmp_path / "engine" / "notes").exists()


def test_only_what_vllm_made_itself_is_noted(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f-80 rw-s 00000000 00:19 {}                 {}\n"
    paths = [
        "/dev/shm/vllm_dist_a-tp:0-[0-1]-cpushm_0",
        "/dev/shm/psm_1",
        "/dev/shm/vllm_dist_b (deleted)",
        "/lib/x.so",
    ]
    maps.write_text("".join(line.format(n, path) for n, path in enumerate(paths)) + "7f-80 rw-p 00000000 00:00 0 \n")
    assert in_shared_memory(maps) == {"vllm_dist_a-tp:0-[0-1]-cpushm_0"}
