"""`prl eval CONFIG|RUN`: the evaluation of a run, without training."""

from __future__ import annotations

from typing import Annotated

import typer

from prl_cli.commands.shared import Json, Quiet, RunsDir, Sets, complete_run


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN", help="A TOML file, or a run by name or folder.", autocompletion=complete_run
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="STEP|FOLDER", help="A step of the run, or a model in the Hugging Face format."
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Held-out tasks of each environment.")] = None,
    sets: Sets = None,
    runs_dir: RunsDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Evaluate a model on held-out tasks.

    For a run, its last checkpoint is evaluated; for a configuration, its model. The result is a run of its own, named
    after it, in which no step is trained.
    """
    from prl_cli.evaluation import evaluation_config
    from prl_cli.launching import Existing, start

    config = evaluation_config(target, checkpoint, tasks=tasks, sets=sets or [], runs_dir=runs_dir)
    raise typer.Exit(start(config, Existing(), quiet=quiet, as_json=json))
