"""`prl run CONFIG...`: one reinforcement-learning run, from checked configuration to summary."""

from __future__ import annotations

import typer

from prl_cli.commands.shared import Clean, Configs, DryRun, Json, Quiet, Resume, Sets, Yes


def run(
    configs: Configs,
    sets: Sets = None,
    resume: Resume = False,
    clean: Clean = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train with reinforcement learning.

    Ctrl-C saves a checkpoint and ends; a second one ends at once. The run goes on where its last checkpoint is with
    --resume, which starts afresh where there is none: a script may always pass it.
    """
    from prl_cli.launching import Existing, show_plan, start
    from prl_cli.loading import load

    config = load(configs, sets, supervised=False).config
    if dry_run:
        show_plan(config, as_json=json)
        return
    raise typer.Exit(start(config, Existing(resume, clean, yes), quiet=quiet, as_json=json))
