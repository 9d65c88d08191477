"""One line that says why a process ended, taken from its exit code and its log; and whether another would end so."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from pathlib import Path

from prl.errors import EnvironmentNotFit, UsageError

TAIL_BYTES = 65_536
LONGEST = 400

HEADER = "=== "
"""How the launcher's own line in a log begins, before the output of each start."""

_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Failed|Exit|NotFit|Broken|Missing)(?::|$)")
_LOGGED = re.compile(r"^(?:\S+ \S+ )?(?:ERROR|CRITICAL|FATAL) (?P<said>.*)")


def how_it_ended(code: int) -> str:
    """An exit code in words; negative is a signal."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def stays_so(code: int, restarts: int) -> bool:
    """Whether a process that ended so would end so again: what it was told is wrong, or the machine is not fit for it.
    After another death the latter may pass: what the dead process had of a GPU's memory is not free at once."""
    return code == UsageError.exit_code or (code == EnvironmentNotFit.exit_code and not restarts)


def last_error(log: Path) -> str:
    """The line of the last start in a log that most likely says what went wrong; "" when there is no output."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    own: list[str] = []
    for line in lines:
        if line.startswith(HEADER):
            own.clear()
        elif line.strip():
            own.append(line)
    errors = [said for line in own if (said := _said(line))]
    chosen = (errors or own or [""])[-1].strip()
    return chosen if len(chosen) <= LONGEST else chosen[: LONGEST - 3] + "..."


def _said(line: str) -> str:
    """The line of an exception, or a logged error without its time and level; "" for any other line."""
    if _EXCEPTION.match(line):
        return line
    logged = _LOGGED.match(line)
    return logged["said"] if logged else ""


def cause(name: str, what: str, code: int | None, log: Path) -> str:
    """As in "engine-0 ended with code 1: OutOfMemoryError: ...; see runs/x/logs/engine-0.log".

    A process that was killed from outside had no chance to say why, so its last words are not quoted.
    """
    quoted = "" if code in (-signal.SIGKILL, -signal.SIGTERM) else last_error(log)
    return f"{name} {what}{': ' + quoted if quoted else ''}; see {log}"


def told_by_controller(status: Path) -> tuple[str, str]:
    """Why the controller gave up and the log that shows it, relative to the run directory; ("", "") when it wrote no
    such thing into its status file."""
    try:
        document = json.loads(status.read_bytes())
        return str(document.get("failed_reason") or ""), str(document.get("log") or "")
    except (OSError, ValueError, AttributeError):
        return "", ""


def shown(path: Path) -> Path:
    """Relative to where the user is, when that is shorter."""
    with contextlib.suppress(ValueError):
        return path.absolute().relative_to(Path.cwd())
    return path
