"""`prl doctor [CONFIG...]`: what this machine can do, and a remedy for each thing that is not fine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prl_cli.commands.shared import Json, RunsDir, Sets, Supervised, complete_config

if TYPE_CHECKING:
    from prl_cli.doctor.finding import Finding


def doctor(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CONFIG...]", help="Check that this configuration fits, too.", autocompletion=complete_config
        ),
    ] = None,
    sets: Sets = None,
    supervised: Supervised = False,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Check whether this machine can do a run.

    Exit code 0 when it can, perhaps with warnings, 3 when it cannot.
    """
    from prl.errors import EnvironmentNotFit
    from prl_cli import output

    findings = []
    for finding in _findings(configs or [], sets or [], supervised, runs_dir):
        findings.append(finding)
        if not json:
            _show(finding)
    failed = sum(finding.level == "fail" for finding in findings)
    if json:
        output.emit_json({"fit": not failed, "findings": [finding.as_dict() for finding in findings]})
    elif failed:
        output.say(f"{failed} of {len(findings)} checks failed: this machine is not fit yet")
    if failed:
        raise typer.Exit(EnvironmentNotFit.exit_code)


def _findings(configs: list[Path], sets: list[str], supervised: bool, runs_dir: Path | None) -> Iterator[Finding]:
    """In the order in which a person would look: the configuration, the machine, the packages, and how they fit."""
    from prl_cli import runs
    from prl_cli.doctor.machine import check_machine
    from prl_cli.doctor.packages import check_packages, probe
    from prl_cli.doctor.setup import check_setup

    config = None
    if configs:
        from prl_cli.loading import load

        config = load(configs, sets, supervised=supervised).config
    yield from check_machine(runs_dir or (Path(config.runs_dir) if config else runs.default_runs_dir()))
    told, broke = probe()
    yield from check_packages(told, broke)
    if config is not None:
        yield from check_setup(config, told)


def _show(finding: Finding) -> None:
    color = {"ok": "green", "warn": "yellow", "fail": "red"}[finding.level]
    typer.secho(finding.level.ljust(5), fg=color, bold=finding.level == "fail", nl=False)
    typer.echo(f" {finding.name.ljust(14)} {finding.seen}")
    if finding.remedy:
        typer.echo(f"      {' ' * 14} -> {finding.remedy}")
