"""`prl serve MODEL|CONFIG`: the inference side alone."""

from __future__ import annotations

from typing import Annotated

import typer

from prl_cli.commands.shared import DryRun, Json, Quiet, RunsDir, Sets, complete_config


def serve(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|CONFIG]",
            help="A model's folder or name on the hub, or a TOML file.",
            autocompletion=complete_config,
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--ckpt", metavar="RUN[:STEP]", help="A run's checkpoint, the last or of a step."),
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="The inference server; vllm when left out.")] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=1, help="Servers, each with all of the model.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Of the first server; a free one when left out.")
    ] = None,
    sets: Sets = None,
    runs_dir: RunsDir = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Serve a model over HTTP, without training.

    Of a configuration it reads the model, the engine and the launcher. One line for each server says where it answers
    and under which name; every request needs the key. Ctrl-C ends all of it.
    """
    from prl_cli import serving

    config = serving.serving_config(
        target,
        checkpoint,
        engine=engine,
        replicas=replicas,
        port=port,
        sets=sets or [],
        runs_dir=runs_dir,
        start=not dry_run,
    )
    if dry_run:
        serving.show_plan(config, as_json=json)
        return
    raise typer.Exit(serving.serve(config, quiet=quiet, as_json=json))
