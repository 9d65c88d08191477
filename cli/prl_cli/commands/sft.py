"""`prl sft CONFIG...`: one supervised run, with the same trainer and the same run directory."""

from __future__ import annotations

import typer

from prl_cli.commands.shared import Clean, Configs, DryRun, Json, Quiet, Resume, Sets, Yes


def sft(
    configs: Configs,
    sets: Sets = None,
    resume: Resume = False,
    clean: Clean = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train on examples (supervised).

    The examples are a JSONL file; the result is exported like that of any run, with prl export.
    """
    from prl_cli.launching import Existing, show_plan, start
    from prl_cli.loading import load

    config = load(configs, sets, supervised=True).config
    if dry_run:
        show_plan(config, as_json=json)
        return
    raise typer.Exit(start(config, Existing(resume, clean, yes), quiet=quiet, as_json=json))
