"""The end of a run, told in a few lines on standard output, or as one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from prl.rundir import RunDir
from prl_cli import output, runs
from prl_cli.tail import JsonLines

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


def _count(name: str, value: object) -> str:
    """A count; counts by reason are added up: "5 dropped (no_signal 3, stale 2)"."""
    if not isinstance(value, dict):
        return f"{output.number(value)} {name}"
    reasons = ", ".join(f"{reason} {output.number(count)}" for reason, count in value.items())
    return f"{output.number(sum(value.values()))} {name}" + (f" ({reasons})" if reasons else "")


def lines(run: RunDir, summary: dict[str, Any], more: Sequence[tuple[str, str]] = ()) -> list[str]:
    """What a person wants to know of a finished run, from its summary."""
    head = f"{run.name}: {summary.get('outcome', 'ended')}"
    steps = summary.get("steps")
    trained = steps != 0
    if trained and steps is not None:
        head += f" after {output.number(steps)} steps"
    if isinstance(summary.get("seconds"), int | float) and trained:
        # Seconds and busy shares count from the last start.
        since, time = summary.get("resumed_at"), output.duration(summary["seconds"])
        if isinstance(since, int) and isinstance(steps, int):
            head += f", {output.number(steps - since)} of them in {time} since it was resumed"
        else:
            head += f" in {time}"
    facts = _results(summary) + _work(summary) + _mismatch(run) if trained else _evaluation(run)
    return [head, *aligned([*facts, ("directory", str(run.path)), *more])]


def aligned(facts: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in facts), default=0)
    return [f"  {name.ljust(width)}  {text}" for name, text in facts]


def _evaluation(run: RunDir) -> list[tuple[str, str]]:
    """The metrics of the last evaluation, by environment: nothing else happened in a run without a step."""
    last = [record for record in JsonLines(run.metrics).new() if "eval/score" in record][-1:]
    return [
        (name.removeprefix("eval/"), output.number(value))
        for record in last
        for name, value in record.items()
        if name.startswith("eval/") and name != "eval/score"
    ]


def _mismatch(run: RunDir) -> list[tuple[str, str]]:
    """How far apart trainer and engines were at most: in training, where tokens of the trainer's own version were, and
    on the probes of every version that was installed."""
    rows = list(JsonLines(run.metrics).new())
    parts = []
    for name, where in (("mismatch/kl", "in training (steps: {})"), ("mismatch/probe_kl", "on probes (versions: {})")):
        found = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if found:
            parts.append(f"{max(found):.1e} {where.format(output.number(len(found)))}")
    return [("mismatch", f"KL at most {', '.join(parts)}")] if parts else []


def _results(summary: dict[str, Any]) -> list[tuple[str, str]]:
    number = output.number
    found = []
    if summary.get("eval_first") is not None or summary.get("eval_last") is not None:
        found.append(("evaluation", f"{number(summary.get('eval_first'))} -> {number(summary.get('eval_last'))}"))
    if summary.get("loss") is not None:
        found.append(("loss", number(summary["loss"])))
    if summary.get("eval_loss") is not None:
        first = summary.get("eval_loss_first")
        came_from = f"{number(first)} -> " if first is not None else ""
        found.append(("held-out", f"{came_from}{number(summary['eval_loss'])}"))
    if summary.get("left_out"):
        found.append(("left out", ", ".join(f"{number(n)} {reason}" for reason, n in summary["left_out"].items())))
    return found


def _work(summary: dict[str, Any]) -> list[tuple[str, str]]:
    number = output.number
    found = []
    if "tokens_trained" in summary:
        text = f"{number(summary['tokens_trained'])} trained"
        if "tokens_generated" in summary:
            text += f", {number(summary['tokens_generated'])} generated"
        found.append(("tokens", text))
    rollouts, staleness = summary.get("rollouts"), summary.get("staleness")
    if isinstance(rollouts, dict):
        found.append(("rollouts", ", ".join(_count(key, value) for key, value in rollouts.items())))
    if isinstance(staleness, dict):
        found.append(("staleness", f"mean {number(staleness.get('mean'), 2)}, max {number(staleness.get('max'))}"))
    busy = [(name, summary.get(f"{name}_busy")) for name in ("engine", "trainer")]
    known = [f"{name} {value:.0%}" for name, value in busy if isinstance(value, int | float)]
    if known:
        found.append(("busy", ", ".join(known)))
    return found
