"""The application: which commands there are, and where each of them lives.

Only typer is imported here. A command's module is imported when it is invoked.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from prl_cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "init": LazyCommand("prl_cli.commands.init:init", "Write a commented configuration to start from."),
    "run": LazyCommand("prl_cli.commands.train:run", "Train with reinforcement learning."),
    "sft": LazyCommand("prl_cli.commands.train:sft", "Train on examples (supervised)."),
    "eval": LazyCommand("prl_cli.commands.evaluate:evaluate", "Evaluate a model on held-out tasks."),
    "serve": LazyCommand("prl_cli.commands.serve:serve", "Serve a model over HTTP, without training."),
    "bench": LazyCommand("prl_cli.commands.bench:app", "Measure a part of a run on synthetic data."),
    "runs": LazyCommand("prl_cli.commands.runs:app", "List runs, or show one."),
    "config": LazyCommand("prl_cli.commands.config:app", "Show, explain or check a configuration."),
    "plugins": LazyCommand("prl_cli.commands.plugins:app", "List, check, install and remove plugins."),
    "doctor": LazyCommand("prl_cli.commands.doctor:doctor", "Check whether this machine can do a run."),
    "stop": LazyCommand("prl_cli.commands.control:stop", "End a run with a checkpoint."),
    "pause": LazyCommand("prl_cli.commands.control:pause", "Let a run hold still until it is resumed."),
    "resume": LazyCommand("prl_cli.commands.control:resume", "Let a paused run go on."),
    "checkpoint": LazyCommand("prl_cli.commands.control:checkpoint", "Save a checkpoint of a run now."),
    "scale": LazyCommand("prl_cli.commands.control:scale", "Change how many engines a run has, while it goes on."),
    "why-stuck": LazyCommand("prl_cli.commands.control:why_stuck", "Say what a run waits for, and for how long."),
    "export": LazyCommand("prl_cli.commands.export:export", "Write a checkpoint as a Hugging Face folder."),
    "import": LazyCommand("prl_cli.commands.export:import_weights", "Put a folder's weights into a run's checkpoint."),
}


class Root(LazyGroup):
    table = COMMANDS
    entry_points = "prl.commands"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"prl {version('prl-console')} (core {version('prl-core')})")
        raise typer.Exit


# Panels for a person, plain text for a script: rich more than doubles the start-up time of `--help`.
app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 this machine is not fit (prl doctor),
    75 stopped by its host and resumable, 130 interrupted twice.
    """


def main() -> None:
    app(prog_name="prl")
