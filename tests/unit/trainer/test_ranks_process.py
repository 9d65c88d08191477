"""Several ranks as processes of one group: who ends whom, with which exit code, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEP = "import time; time.sleep(60)"


def start(script: Path, code: str, ranks: int = 3) -> subprocess.Popen[str]:
    script.write_text(f"import os, pathlib, sys\nrank = int(os.environ['RANK'])\n{code}\n")
    command = [sys.executable, "-m", "prl_trainer_fsdp.ranks", str(ranks), str(script)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def write_pid(folder: Path) -> str:
    return f"pathlib.Path({str(folder)!r}, f'pid{{rank}}').write_text(str(os.getpid()))\n"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(75 if rank else 0)", 75),
        ("sys.exit(3) if rank == 1 else __import__('time').sleep(60)", 3),
        ("os.kill(os.getpid(), 9) if rank == 2 else __import__('time').sleep(60)", 1),
    ],
)
def test_the_first_failure_is_the_groups(tmp_path: Path, code: str, expected: int) -> None:
    process = start(tmp_path / "rank.py", write_pid(tmp_path) + code)
    _, said = process.communicate(timeout=60)
    assert process.returncode == expected
    assert ("rank 2 was killed by SIGKILL" in said) == (expected == 1)
    assert all(gone(int(path.read_text())) for path in tmp_path.glob("pid*"))


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    wait = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    process = start(tmp_path / "rank.py", wait + write_pid(tmp_path) + SLEEP)
    deadline = time.monotonic() + 60
    while len([path for path in tmp_path.glob("pid*") if path.read_text()]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    assert all(gone(int(path.read_text())) for path in tmp_path.glob("pid*"))


def test_every_rank_knows_its_place_and_stays_on_loopback(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    process = start(tmp_path / "rank.py", f"sys.stdout.write(' '.join(os.environ[n] for n in {names}) + chr(10))", 2)
    told, _ = process.communicate(timeout=60)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    assert sorted(told.splitlines()) == [f"{rank} {rank} 2 {loopback} {loopback}" for rank in (0, 1)]
