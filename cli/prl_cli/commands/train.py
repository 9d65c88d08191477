"""`prl run CONFIG...` and `prl sft CONFIG...`: one run, from checked configuration to summary."""

from __future__ import annotations

from pathlib import Path

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
    _train(configs, sets, (resume, clean, yes), supervised=False, dry_run=dry_run, quiet=quiet, json=json)


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

    The examples are JSONL or Parquet files or datasets; they are checked before the model is loaded. The trained model
    is model/ in the run directory; it is also exported like that of any run, with prl export.
    """
    _train(configs, sets, (resume, clean, yes), supervised=True, dry_run=dry_run, quiet=quiet, json=json)


def _train(
    configs: list[Path],
    sets: list[str] | None,
    existing: tuple[bool, bool, bool],
    *,
    supervised: bool,
    dry_run: bool,
    quiet: bool,
    json: bool,
) -> None:
    from prl_cli.launching import Existing, show_plan, start
    from prl_cli.loading import load

    config = load(configs, sets, supervised=supervised, start=not dry_run).config
    if dry_run:
        show_plan(config, as_json=json)
        return
    raise typer.Exit(start(config, Existing(*existing), quiet=quiet, as_json=json))
