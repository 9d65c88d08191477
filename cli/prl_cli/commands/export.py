"""`prl export RUN OUT`: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prl_cli.commands.shared import Json, RunName, RunsDir


def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must be new or empty.")],
    step: Annotated[
        int | None, typer.Option("--step", help="The checkpoint of this step; the last one when left out.")
    ] = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    from prl_cli import exporting, output, runs

    found = runs.find(run, runs_dir)
    exported = exporting.export(found, step, out)
    if json:
        output.emit_json({"run": found.name, "step": exported, "path": str(out.resolve())})
    else:
        typer.echo(f"step {exported} of {found.name} is in {out}")
