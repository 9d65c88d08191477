"""`prl runs`: what was run here, read from the run directories alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from prl_cli.commands.shared import Json, RunName, RunsDir

if TYPE_CHECKING:
    from prl.rundir import RunDir

app = typer.Typer(add_completion=False, help="List runs, or show one.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def default(context: typer.Context, runs_dir: RunsDir = None, json: Json = False) -> None:
    """List runs, or show one."""
    if context.invoked_subcommand is None:
        list_runs(runs_dir, json)


@app.command("list")
def list_runs(runs_dir: RunsDir = None, json: Json = False) -> None:
    """List the runs of a folder, the latest last."""
    from prl_cli import output, runs

    root = runs_dir or runs.default_runs_dir()
    rows = [_row(run) for run in runs.all_runs(root)]
    if json:
        output.emit_json({"runs_dir": str(root), "runs": rows})
    elif not rows:
        output.say(f"no runs in {root}/")
    else:
        output.table([_cells(row) for row in rows], ("run", "state", "step", "reward", "eval", "started"))


@app.command("show")
def show(run: RunName, runs_dir: RunsDir = None, json: Json = False) -> None:
    """Show one run: state, results, checkpoints, logs."""
    from prl_cli import output, runs
    from prl_cli.progress import waited_for
    from prl_cli.summary import aligned, lines

    found = runs.find(run, runs_dir)
    row = _row(found)
    summary = runs.read_json(found.summary)
    status = runs.status(found)
    checkpoints = runs.checkpoint_steps(found)
    logs = sorted(path.name for path in found.logs.glob("*.log"))
    if json:
        output.emit_json({**row, "status": status, "summary": summary, "checkpoints": checkpoints, "logs": logs})
        return
    facts = [
        ("checkpoints", ", ".join(map(str, checkpoints)) or "none"),
        ("logs", f"{found.logs}/ ({', '.join(logs)})" if logs else "none"),
    ]
    if status.get("waiting_for") and status.get("state") not in runs.ENDED:
        facts.append(("waits for", waited_for(status)))
    if status.get("failed_reason"):
        facts.append(("failed", str(status["failed_reason"])))
    if summary:
        told = lines(found, summary, facts)
    else:
        where = f" at step {row['step']}/{row['steps']}" if row["step"] is not None else ""
        told = [f"{found.name}: {row['state']}{where}", *aligned(facts)]
    for line in told:
        typer.echo(line)


def _row(run: RunDir) -> dict[str, Any]:
    from prl_cli import runs

    status, summary = runs.status(run), runs.read_json(run.summary)
    alive = runs.is_alive(run)
    return {
        "name": run.name,
        "path": str(run.path),
        "alive": alive,
        "state": status.get("state") or ("starting" if alive else summary.get("outcome", "dead")),
        "step": status.get("step", summary.get("steps")),
        "steps": status.get("steps", summary.get("steps")),
        "reward": status.get("reward"),
        "eval_last": status.get("eval_last", summary.get("eval_last")),
        "started": runs.started_at(run),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    from prl_cli import output

    step = "-" if row["step"] is None else f"{row['step']}/{row['steps'] if row['steps'] is not None else '?'}"
    when = output.ago(time.time() - row["started"])
    return [row["name"], row["state"], step, output.number(row["reward"]), output.number(row["eval_last"]), when]
