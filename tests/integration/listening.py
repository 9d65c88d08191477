"""Where a process listens, as the kernel says."""

from __future__ import annotations

import os
from pathlib import Path


def listening(pid: int) -> list[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens, IPv6 included."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                found.append((dotted(host), int(port, 16)))
    return found


def dotted(host: str) -> str:
    """ "0100007F" is 127.0.0.1; an IPv6 address stays as it is."""
    if len(host) != 8:
        return host
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(host)))
