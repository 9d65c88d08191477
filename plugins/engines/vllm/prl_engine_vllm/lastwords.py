"""What vLLM said before it gave up. Its processes write the cause into the log that they share with ours."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 200_000
HEADER = "=== "
"""How the launcher's line before each start begins."""

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:(?:ERROR|CRITICAL)\s+\d\d-\d\d\s+[\d:]+\s+\[[^\]]*\]\s?)?")
"""As in "(EngineCore pid=12) ERROR 12-01 01:02:03 [core.py:12] ValueError: ..."."""
_CAUSE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|NotFit)\b: .+")
_EMPTY = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
)
"""Errors that only say that another one came before."""

_PASSING = ("Error in memory profiling", *_EMPTY)
"""Another process freed memory of the GPU meanwhile, or one of vLLM's own was killed and could not say why."""


def may_pass(said: str) -> bool:
    """Whether an error at the start may be gone at the next one."""
    return any(passing in said for passing in _PASSING)


def last_words(log: Path) -> str:
    """The last error that says something, of the last start in a log; "" where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = ""
    for line in lines:
        if line.startswith(HEADER):
            found = ""
            continue
        said = _PREFIX.sub("", _COLOUR.sub("", line)).strip()
        if _CAUSE.match(said) and not any(empty in said for empty in _EMPTY):
            found = said
    return found
