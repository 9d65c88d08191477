"""Files that survive a crash and a full disk: whole-file replacement, and appending without torn ends.

A reader may look at any time, also from another machine over a network file system; append and rename are the only
operations that one writer and many readers can rely on there, so nothing here locks, maps, or updates in place.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from pathlib import Path

from prl import faults
from prl.errors import StoreError

WRITE_POINT = "store.write"


def store_error(doing: str, path: Path, error: OSError) -> StoreError:
    """What went wrong, where, and what a person can do about it."""
    remedy = {
        errno.ENOSPC: "the disk is full: free space there, then continue with --resume",
        errno.EDQUOT: "your quota is used up: free space there, then continue with --resume",
        errno.EROFS: "the file system is read-only: choose another runs_dir",
        errno.EACCES: "permission denied: check who owns the run directory",
        errno.EIO: "the device reports an input/output error: check the disk or the mount",
        errno.ESTALE: "the network file system lost the file: check the mount, then continue with --resume",
    }
    reason = remedy.get(error.errno or 0, f"{error.strerror or error}; what was written before is intact")
    return StoreError(f"cannot {doing} {path}: {reason}")


def sha256_file(path: Path) -> str:
    """In hex, at about 1.7 GB/s a thread where the processor has SHA instructions."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_directory(path: Path) -> None:
    """Make a rename in this directory durable. File systems that cannot sync a directory do not need it."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def atomic_write(path: Path, data: bytes, *, mode: int = 0o644, point: str = WRITE_POINT, durable: bool = True) -> None:
    """Replace a file as a whole: a reader sees the old content or the new, also after a crash.

    `durable` waits until it is on the disk, milliseconds that a file which is soon replaced again is not worth.

    Raises:
        StoreError: it cannot be written; the old content is intact.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        faults.point(point)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
        temporary.replace(path)
        if durable:
            fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise store_error("write", path, error) from error


class AppendFile:
    """Appends whole pieces. One that could only be written in part is taken back: the file ends where it was good."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise store_error("open", path, error) from error

    def append(self, data: bytes) -> None:
        """Write with one system call where the system allows.

        Raises:
            StoreError: not all of it could be written; none of it is in the file.
        """
        try:
            faults.point(WRITE_POINT)
            written = os.write(self._fd, data)
            while written < len(data):  # a disk that is filling takes a part first and fails on the rest
                written += os.write(self._fd, data[written:])
            self.size += len(data)
        except OSError as error:
            self.truncate(self.size)
            raise store_error("append to", self.path, error) from error

    def truncate(self, size: int) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)
            self.size = size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def complete_lines(data: bytes) -> list[bytes]:
    """The lines that end with a newline; what follows the last one was cut off by a crash."""
    return data[: data.rfind(b"\n") + 1].splitlines()


def repair_lines(path: Path) -> int:
    """Cut a torn last line off, so that the next line does not continue it. Returns the bytes removed."""
    try:
        with path.open("r+b") as file:
            data = file.read()
            good = data.rfind(b"\n") + 1
            if good < len(data):
                file.truncate(good)
            return len(data) - good
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise store_error("repair", path, error) from error
