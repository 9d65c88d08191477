"""Arguments that several commands have, so that they are called the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value, such as loop.steps=20.")
]
RunsDir = Annotated[
    Path | None, typer.Option("--runs-dir", help="Folder of runs; ./runs or $PRL_RUNS_DIR when left out.")
]


def complete_run(incomplete: str) -> list[str]:
    """Names of runs, for the shell."""
    from prl_cli import runs

    return [run.name for run in runs.all_runs(runs.default_runs_dir()) if run.name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    folder, _, start = incomplete.rpartition("/")
    root = Path(folder or ".")
    if not root.is_dir():
        return []
    prefix = f"{folder}/" if folder else ""
    return [
        f"{prefix}{path.name}{'/' if path.is_dir() else ''}"
        for path in sorted(root.iterdir())
        if path.name.startswith(start) and (path.is_dir() or path.suffix == ".toml")
    ]


RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or its folder.", autocompletion=complete_run)]
Configs = Annotated[
    list[Path],
    typer.Argument(
        metavar="CONFIG...", help="TOML files; later ones override earlier ones.", autocompletion=complete_config
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run of this name from its last checkpoint.")]
Clean = Annotated[bool, typer.Option("--clean", help="Remove the run of this name first; asks before it does.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, start and write nothing.")]
Supervised = Annotated[bool, typer.Option("--sft", help="It is a configuration of prl sft.")]
