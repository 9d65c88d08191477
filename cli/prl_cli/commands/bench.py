"""`prl bench`: how fast this machine is at a part of a run, on synthetic data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prl_cli.commands.shared import Configs, Sets

app = typer.Typer(
    add_completion=False,
    help="Measure a part of a run on synthetic data.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def group() -> None:
    """Measure a part of a run on synthetic data."""


@app.command("trainer")
def trainer(
    configs: Configs,
    sets: Sets = None,
    documents: Annotated[
        str | None, typer.Option("--documents", help="Lengths of a row's documents, such as 6000,200,3000.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", help="Packed rows of every data-parallel rank.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Steps that are timed; the median counts.")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", help="Steps before those.")] = None,
    shapes: Annotated[
        str | None,
        typer.Option("--shapes", help="Random weights of known shapes instead of a checkpoint, such as qwen3-0.6b."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="FILE", help="Profile one more step: a trace if FILE ends in .json, else a table."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the result there, a list of one row.")
    ] = None,
) -> None:
    """Time the trainer's step: tokens per second, MFU, the parts of a step, peak memory.

    CONFIG is a run's configuration, whose model, loss and trainer are taken, or one with the tables [model], [trainer],
    [loss] and [bench] alone. The options are keys of [bench] and override it.
    """
    from prl_cli import benching

    chosen = {
        "documents": None if documents is None else benching.lengths(documents),
        "rows": rows,
        "steps": steps,
        "warmup": warmup,
        "shapes": shapes,
    }
    given = {key: value for key, value in chosen.items() if value is not None}
    raise typer.Exit(benching.trainer(configs, sets, given, profile, out))
