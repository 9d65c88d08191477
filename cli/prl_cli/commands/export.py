"""`prl export RUN OUT` and `prl import FOLDER RUN`: between checkpoints and folders that transformers loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prl_cli.commands.shared import Json, RunName, RunsDir


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    run: RunName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must be new or empty.")],
    step: Annotated[
        int | None, typer.Option("--step", help="The checkpoint of this step; the last one when left out.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Precision of the weights; that of the run when left out.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The low-rank adapters alone, in PEFT's format, instead of merged.")
    ] = False,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    from prl_cli import exporting, output, runs

    found = runs.find(run, runs_dir)
    exported = exporting.export(found, step, out, dtype=dtype or "", adapter=adapter)
    if json:
        output.emit_json({"run": found.name, "step": exported, "path": str(out.resolve())})
    else:
        typer.echo(f"step {exported} of {found.name} is in {out}")


def import_weights(
    source: Annotated[str, typer.Argument(metavar="FOLDER", help="A Hugging Face folder, or a name on the hub.")],
    run: RunName,
    step: Annotated[
        int | None, typer.Option("--step", help="Into the checkpoint of this step; the last one when left out.")
    ] = None,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Put a folder's weights into a run's checkpoint.

    --resume then goes on from them. The optimiser begins anew; step, samples and random states stay. The
    former checkpoint and later ones move into `replaced/` of the run. A run that has not started takes its weights
    from model.path instead.
    """
    from prl.errors import UsageError
    from prl_cli import exporting, output, runs

    if run.endswith(".toml"):
        raise UsageError(f"{run} is a configuration: of a run that has not started set model.path = {source!r}")
    found = runs.find(run, runs_dir)
    imported, aside = exporting.import_weights(found, step, source)
    if json:
        output.emit_json({"run": found.name, "step": imported, "replaced": str(aside)})
    else:
        typer.echo(f"step {imported} of {found.name} has the weights of {source}; what it had is in {aside}")
