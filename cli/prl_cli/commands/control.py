"""`prl stop|pause|resume|checkpoint|scale|why-stuck RUN`: ask the controller of a run that is going on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prl_cli.commands.shared import Json, RunName, RunsDir

if TYPE_CHECKING:
    from prl.messages import Action

Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer.")]


def stop(run: RunName, runs_dir: RunsDir = None, timeout: Timeout = 60, json: Json = False) -> None:
    """End a run with a checkpoint."""
    _ask(run, "stop", runs_dir, timeout, json)


def pause(run: RunName, runs_dir: RunsDir = None, timeout: Timeout = 60, json: Json = False) -> None:
    """Let a run hold still until it is resumed."""
    _ask(run, "pause", runs_dir, timeout, json)


def resume(run: RunName, runs_dir: RunsDir = None, timeout: Timeout = 60, json: Json = False) -> None:
    """Let a paused run go on."""
    _ask(run, "resume", runs_dir, timeout, json)


def checkpoint(run: RunName, runs_dir: RunsDir = None, timeout: Timeout = 600, json: Json = False) -> None:
    """Save a checkpoint of a run now."""
    _ask(run, "checkpoint", runs_dir, timeout, json)


Target = Annotated[str, typer.Argument(metavar="engines=N", help="How many engines there are to be, 1 to 9999.")]


def scale(run: RunName, target: Target, runs_dir: RunsDir = None, timeout: Timeout = 60, json: Json = False) -> None:
    """Change how many engines a run has, while it goes on.

    More are started and serve as soon as they hold the current weights; those that are too many finish what they have
    first. A run that is resumed begins with engine.replicas again.
    """
    _ask(run, "scale", runs_dir, timeout, json, engines=_number(target))


def why_stuck(run: RunName, runs_dir: RunsDir = None, timeout: Timeout = 20, json: Json = False) -> None:
    """Say what a run waits for, and for how long."""
    _ask(run, "why-stuck", runs_dir, timeout, json)


def _number(target: str) -> int:
    """N of "engines=N"."""
    from prl.errors import UsageError

    found = re.fullmatch(r"\s*engines\s*=\s*([1-9][0-9]{0,3})\s*", target)
    if found is None:
        raise UsageError(f"{target!r}: write engines=N with N from 1 to 9999, such as `prl scale RUN engines=3`")
    return int(found[1])


def _ask(name: str, action: Action, runs_dir: Path | None, timeout: float, json: bool, *, engines: int = 0) -> None:
    from prl_cli import control, output, runs

    run = runs.find(name, runs_dir)
    try:
        reply = control.request(run, action, timeout=timeout, engines=engines)
    except control.NotRunning as error:
        if json:
            status = runs.status(run)
            output.emit_json({"ok": False, "run": run.name, "action": action, "message": str(error), "status": status})
            raise typer.Exit(error.exit_code) from error
        raise
    if json:
        output.emit_json(
            {"ok": reply.ok, "run": run.name, "action": action, "message": reply.message, "data": reply.data}
        )
    else:
        typer.echo(reply.message or ("nothing waits" if action == "why-stuck" else "done"), err=not reply.ok)
    if not reply.ok:
        raise typer.Exit(1)
