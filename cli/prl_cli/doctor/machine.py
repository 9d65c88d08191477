"""What the operating system offers."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prl_cli.doctor.finding import Finding

GB = 1 << 30
MIN_DISK = GB // 2
LOW_DISK = 5 * GB
LOW_MEMORY = 2 * GB
LOW_SHM = 256 << 20
LOW_FILES = 1024
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "ceph", "fuse.glusterfs", "beegfs", "lustre")


def check_machine(runs_dir: Path) -> Iterator[Finding]:
    yield python()
    yield system()
    yield memory()
    yield open_files()
    yield shared_memory()
    yield loopback()
    yield disk_space(runs_dir)
    yield file_system(runs_dir)
    yield writing(runs_dir)


def python() -> Finding:
    seen = f"{platform.python_version()} at {sys.executable}"
    if sys.prefix == sys.base_prefix:
        return Finding("python", "warn", f"{seen}, no virtual environment", "make one: python -m venv .venv")
    return Finding("python", "ok", seen)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def system() -> Finding:
    seen = f"{platform.system()} {platform.release()} {platform.machine()}, {cores()} CPU cores for this process"
    if sys.platform != "linux":
        return Finding("system", "warn", seen, "Linux is the supported platform; elsewhere only the CPU path may work")
    return Finding("system", "ok", seen)


def memory() -> Finding:
    import psutil  # type: ignore[import-untyped]

    found = psutil.virtual_memory()
    seen = f"{found.available / GB:.1f} of {found.total / GB:.1f} GiB available"
    limit = cgroup_memory_limit()
    if limit is not None and limit < found.total:
        seen += f", limited to {limit / GB:.1f} GiB by the control group"
    if min(found.available, limit or found.available) < LOW_MEMORY:
        return Finding("memory", "warn", seen, "a run of the smallest model takes about 2 GiB: free some")
    return Finding("memory", "ok", seen)


def cgroup_memory_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """The container's limit in bytes; None without one."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft} (may be raised to {hard})"
    if soft < LOW_FILES:
        return Finding("open files", "warn", seen, f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}")
    return Finding("open files", "ok", seen)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    if not path.is_dir():
        return Finding(
            "shared memory", "warn", f"there is no {path}", "several GPUs on one host need it: mount a tmpfs there"
        )
    usage = shutil.disk_usage(path)
    seen = f"{usage.free / GB:.2f} of {usage.total / GB:.2f} GiB free in {path}"
    if usage.total < LOW_SHM:
        return Finding("shared memory", "warn", seen, "several GPUs on one host need more: docker run --shm-size=8g")
    return Finding("shared memory", "ok", seen)


def loopback() -> Finding:
    """The roles of a run talk over TCP on 127.0.0.1."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                return Finding("ports", "ok", "127.0.0.1 accepts connections on a free port")
    except OSError as error:
        return Finding("ports", "fail", f"127.0.0.1: {error}", "bring the loopback interface up: ip link set lo up")


def existing_parent(path: Path) -> Path:
    """The nearest folder that exists: the runs folder may be made later."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk_space(runs_dir: Path) -> Finding:
    usage = shutil.disk_usage(existing_parent(runs_dir))
    seen = f"{usage.free / GB:.1f} GiB free for {runs_dir}"
    remedy = "free some, or put runs elsewhere with runs_dir"
    if usage.free < MIN_DISK:
        return Finding("disk", "fail", seen, remedy)
    if usage.free < LOW_DISK:
        return Finding("disk", "warn", seen, f"{remedy}; a checkpoint holds 12 bytes per parameter and weights 4 more")
    return Finding("disk", "ok", seen)


def file_system(runs_dir: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Finding:
    """Of which type the file system of the runs folder is: on a network one, files appear late and locks may lie."""
    folder = existing_parent(runs_dir)
    kind = file_system_type(folder, mounts)
    if kind is None:
        return Finding("file system", "ok", "of unknown type")
    seen = f"{kind} for {runs_dir}"
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding(
            "file system", "warn", seen, "files appear late to others there: prefer a local disk for runs_dir"
        )
    if kind in ("tmpfs", "ramfs"):
        return Finding(
            "file system", "warn", f"{seen}: in memory", "runs are lost with the machine: choose another runs_dir"
        )
    return Finding("file system", "ok", seen)


def file_system_type(folder: Path, mounts: Path) -> str | None:
    """From the mount table: the entry with the longest mount point above `folder`; the last of equal ones is on top."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    best: tuple[int, str] | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        if folder.is_relative_to(point) and (best is None or len(point) >= best[0]):
            best = (len(point), right.split()[0])
    return best[1] if best else None


def writing(runs_dir: Path, size: int = 16 << 20) -> Finding:
    """Write, sync and rename a file where the runs are, as checkpoints are written."""
    folder = existing_parent(runs_dir)
    try:
        with tempfile.TemporaryDirectory(prefix=".prl-doctor-", dir=folder) as place:
            started = time.perf_counter()
            path = Path(place) / "part"
            with path.open("wb") as file:
                file.write(b"\0" * size)
                file.flush()
                os.fsync(file.fileno())
            path.rename(path.with_name("whole"))
            speed = size / (time.perf_counter() - started) / (1 << 20)
    except OSError as error:
        return Finding("writing", "fail", f"{folder}: {error}", "choose a runs_dir that this user may write to")
    level = f"{speed:,.0f} MiB/s with sync in {folder}"
    if speed < 20:
        return Finding("writing", "warn", level, "checkpoints will be slow: prefer a faster disk for runs_dir")
    return Finding("writing", "ok", level)
