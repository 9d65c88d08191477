"""The end of a run, told in a few lines on standard output, or as one object."""

from __future__ import annotations

from typing import Any

import typer

from prl.rundir import RunDir
from prl_cli import output, runs

PREEMPTED = 75


def show_summary(run: RunDir, code: int, *, as_json: bool, told: bool = False) -> None:
    """Print summary.json. A run that ended before it wrote one says how far it came.

    Args:
        told: the launcher has already said why the run failed.
    """
    summary = runs.read_json(run.summary)
    if as_json:
        status = runs.read_json(run.status) if not summary else {}
        output.emit_json({"run": run.name, "path": str(run.path), "exit_code": code, **status, **summary})
        return
    if summary:
        for line in lines(run, summary):
            typer.echo(line)
    if code == PREEMPTED:
        output.say(f"stopped; continue it with the same command and --resume (run directory {run.path})")
    elif code != 0 and not told:
        say_failure(run, summary)


def say_failure(run: RunDir, summary: dict[str, Any]) -> None:
    """One line: the cause, and the log that shows it, as the controller gave them."""
    status = runs.read_json(run.status)
    reason, log = summary.get("reason") or status.get("failed_reason"), status.get("log")
    if reason:
        where = f" (log: {run.path / str(log)})" if log else f" (logs: {run.logs})"
        typer.secho("failed: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(f"{reason}{where}", err=True)


def _count(value: object) -> str:
    """A count; counts by reason are added up, as in "5 (no_signal 3, timeout 2)"."""
    if not isinstance(value, dict):
        return output.number(value)
    total = output.number(sum(value.values()))
    return total + (f" ({', '.join(f'{reason} {output.number(n)}' for reason, n in value.items())})" if value else "")


def lines(run: RunDir, summary: dict[str, Any]) -> list[str]:
    """What a person wants to know of a finished run, from its summary."""
    number = output.number
    found = [f"{run.name}: {summary.get('outcome', 'ended')}"]
    if "steps" in summary:
        found[0] += f" after {number(summary['steps'])} steps"
    if isinstance(summary.get("seconds"), int | float):
        found[0] += f" in {output.duration(summary['seconds'])}"
    if summary.get("eval_first") is not None or summary.get("eval_last") is not None:
        found.append(f"  evaluation   {number(summary.get('eval_first'))} -> {number(summary.get('eval_last'))}")
    if summary.get("loss") is not None:
        held_out = f", held-out {number(summary['eval_loss'])}" if summary.get("eval_loss") is not None else ""
        found.append(f"  loss         {number(summary['loss'])}{held_out}")
    if "tokens_trained" in summary:
        text = f"{number(summary['tokens_trained'])} trained"
        if "tokens_generated" in summary:
            text += f", {number(summary['tokens_generated'])} generated"
        found.append(f"  tokens       {text}")
    rollouts = summary.get("rollouts")
    if isinstance(rollouts, dict):
        found.append("  rollouts     " + ", ".join(f"{_count(value)} {key}" for key, value in rollouts.items()))
    staleness = summary.get("staleness")
    if isinstance(staleness, dict):
        found.append(f"  staleness    mean {number(staleness.get('mean'), 2)}, max {number(staleness.get('max'))}")
    busy = [(name, summary.get(f"{name}_busy")) for name in ("engine", "trainer")]
    known = [f"{name} {value:.0%}" for name, value in busy if isinstance(value, int | float)]
    if known:
        found.append(f"  busy         {', '.join(known)}")
    found.append(f"  directory    {run.path}")
    return found
