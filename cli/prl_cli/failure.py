"""How an error becomes a few lines on standard error and an exit code.

What prl raises on purpose: a title and its message, never a traceback. Anything else is a defect: one line, and the
traceback goes to a file. `PRL_DEBUG=1` prints every traceback.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

from prl.errors import (
    ConfigError,
    EnvironmentNotFit,
    PluginError,
    Preempted,
    PrlError,
    RunFailed,
    StoreError,
    UsageError,
    WeightsError,
    WireError,
)

DEBUG_VARIABLE = "PRL_DEBUG"

_TITLES: tuple[tuple[type[PrlError], str], ...] = (
    (ConfigError, "configuration error"),
    (PluginError, "plugin error"),
    (UsageError, "error"),
    (EnvironmentNotFit, "this machine is not fit for it"),
    (RunFailed, "the run failed"),
    (Preempted, "stopped by its host; continue it with --resume"),
    (WireError, "the run does not answer"),
    (StoreError, "storage error"),
    (WeightsError, "weights error"),
    (PrlError, "error"),
)

_log_folder: Path | None = None


def keep_tracebacks_in(folder: Path) -> None:
    """From now on the traceback of a defect is written into this folder of the run directory."""
    global _log_folder
    _log_folder = folder


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Report what is raised inside and end with its exit code."""
    debug = os.environ.get(DEBUG_VARIABLE) not in (None, "", "0")
    try:
        yield
    except PrlError as error:
        if debug:
            traceback.print_exc()
        show(error)
        raise typer.Exit(error.exit_code) from error
    except (typer.Exit, typer.Abort, typer.TyperException, KeyboardInterrupt, EOFError, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            raise
        typer.secho(f"internal error: {_one_line(error)}", fg="red", err=True)
        typer.echo(f"  traceback: {_write_traceback(error)} (or run again with {DEBUG_VARIABLE}=1)", err=True)
        raise typer.Exit(1) from error


def show(error: PrlError) -> None:
    """Print a deliberate error: several problems are listed under the title, a single line stands beside it."""
    title = next(title for kind, title in _TITLES if isinstance(error, kind))
    if isinstance(error, ConfigError):
        count = len(error.problems)
        title += f" ({count} problems)" if count > 1 else ""
    lines = str(error).splitlines() or [type(error).__name__]
    typer.secho(f"{title}:", fg="red", bold=True, err=True, nl=False)
    if len(lines) == 1:
        typer.echo(f" {lines[0]}", err=True)
    else:
        typer.echo("", err=True)
        for line in lines:
            typer.echo(f"  {line}", err=True)
    if isinstance(error, RunFailed) and error.log:
        typer.echo(f"  log: {error.log}", err=True)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _write_traceback(error: Exception) -> Path:
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        if _log_folder is not None and _log_folder.is_dir():
            path = _log_folder / "cli.log"
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
            return path
    descriptor, name = tempfile.mkstemp(prefix="prl-error-", suffix=".log", text=True)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)
