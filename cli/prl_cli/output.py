"""What goes where: results to standard output, everything else to standard error. `--json` prints one object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import typer

JSON_SCHEMA = 1
"""Version of every object that `--json` prints."""


def emit_json(value: Mapping[str, Any]) -> None:
    """One object on standard output. Numbers that JSON does not know become null."""
    typer.echo(json.dumps({"schema_version": JSON_SCHEMA, **_plain(value)}, indent=2, default=str))


def say(text: str) -> None:
    """A remark for a person: standard error."""
    typer.echo(text, err=True)


def warn(text: str) -> None:
    typer.secho("warning: ", fg="yellow", err=True, nl=False)
    typer.echo(text, err=True)


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> None:
    """Aligned columns on standard output; the last one is not padded."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    if not cells:
        return
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for number, row in enumerate(cells):
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        line = "  ".join([*padded, row[-1]]).rstrip()
        if header and number == 0:
            typer.secho(line, bold=True)
        else:
            typer.echo(line)


def number(value: object, digits: int = 3) -> str:
    """A number for a person: "1,234", "0.417", "-" for what is not known."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """ "42 s", "3:07", "1:02:09"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def ago(seconds: float) -> str:
    """ "4 min ago", for times of files."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
