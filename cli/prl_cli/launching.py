"""From a checked configuration to a finished run.

`start` is the one path for `prl run`, `prl sft` and `prl eval`: claim the run directory, write what the roles read,
hand the plan to the launcher, show its progress, and report how it ended.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prl.errors import UsageError
from prl.rundir import RunDir
from prl_cli import failure, output, runs
from prl_cli.progress import Progress
from prl_cli.summary import PREEMPTED, show_summary

if TYPE_CHECKING:
    from prl.config.schema import RunConfig, ServeConfig, SftConfig
    from prl.plan import Plan

    AnyConfig = RunConfig | SftConfig


@dataclass(frozen=True)
class Existing:
    """What to do with a run directory that is already there. Neither: refuse."""

    resume: bool = False
    clean: bool = False
    yes: bool = False


def start(config: AnyConfig, existing: Existing, *, quiet: bool = False, as_json: bool = False) -> int:
    """Run it to its end and print its summary. Returns the exit code: 0, 1, 3, 75 or 130.

    Raises:
        ConfigError, PluginError, EnvironmentNotFit: before anything was written.
        UsageError: the run exists and is neither resumed nor cleaned, or is going on.
    """
    from prl import planning

    run = run_dir(config)
    plan = planning.build_plan(config, run)
    launcher = config.launcher.build()
    fit(launcher, plan)
    with ExitStack() as stack:
        stack.enter_context(claimed(run, existing))
        failure.keep_tracebacks_in(run.logs)
        write_inputs(run, config, plan)
        progress = stack.enter_context(Progress(run, quiet=quiet))
        code = int(launcher.run(plan, run, progress.on_tick))
        if progress.cause and code not in (0, PREEMPTED, 130):
            note_failure(run, progress.cause)
    show_summary(run, code, as_json=as_json, told=progress.cause != "")
    return code


def fit(launcher: Any, plan: Plan) -> None:
    """Ask a launcher that can tell before it starts anything, as `check(plan)`.

    Raises:
        EnvironmentNotFit: it cannot give what the plan needs.
    """
    check = getattr(launcher, "check", None)
    if check is not None:
        check(plan)


def run_dir(config: AnyConfig | ServeConfig) -> RunDir:
    return RunDir((Path(config.runs_dir).expanduser() / config.name).absolute())


@contextmanager
def claimed(run: RunDir, existing: Existing) -> Iterator[None]:
    """Create or reuse the run directory and hold its lock.

    Raises:
        UsageError: it exists and may not be used, or another process holds it.
    """
    if existing.resume and existing.clean:
        raise UsageError("--resume continues a run and --clean removes it: choose one")
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file, not a run directory: choose another name with --set name=...")
    if run.path.exists() and any(run.path.iterdir()):
        if existing.clean:
            _confirm_removal(run, existing.yes)
            runs.remove(run)
        elif not existing.resume:
            raise UsageError(_refusal(run))
        elif not runs.is_run(run.path):
            raise UsageError(f"{run.path} is not a run directory: there is nothing to resume in it")
    try:
        for folder in (run.path, run.logs, run.control):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the run directory {run.path} cannot be made: {error.strerror}") from error
    with runs.held(run):
        yield


def _refusal(run: RunDir) -> str:
    if runs.is_alive(run):
        return (
            f"run {run.name!r} is going on in {run.path}: `prl stop {run.name}` ends it, --set name=... starts another"
        )
    if not runs.is_run(run.path):
        return f"{run.path} exists and is not a run directory: choose another name with --set name=..."
    steps = runs.checkpoint_steps(run)
    last = f"its last checkpoint is of step {steps[-1]}" if steps else "it has no checkpoint"
    resumed = "continues it" if steps else "starts it afresh"
    return (
        f"run {run.name!r} exists in {run.path} ({last}): --resume {resumed}, --clean removes it first, "
        "--set name=... starts another"
    )


def _confirm_removal(run: RunDir, yes: bool) -> None:
    """Ask a person; refuse when there is nobody to ask."""
    if not runs.is_run(run.path) or yes:
        return  # what is no run directory is refused by `remove`
    if not sys.stdin.isatty():
        raise UsageError(f"--clean would remove {run.path}: add --yes to confirm it where no terminal can ask")
    if not typer.confirm(f"Remove {run.path} with its checkpoints and rollouts?", err=True):
        raise UsageError("nothing was removed and nothing was started")


def write_inputs(run: RunDir, config: AnyConfig, plan: Plan) -> None:
    """What the roles read: token, configuration, plan, and what is installed.

    Raises:
        StoreError: the disk is full or may not be written to.
    """
    import msgspec

    from prl.store.files import atomic_write
    from prl.store.lock import write_config, write_lock

    current = config.model_dump(mode="json")
    former = runs.read_json(run.config)
    if former and former != current:
        output.warn(f"resuming with a changed configuration: {', '.join(list(_differences(former, current))[:12])}")
    for stale in (run.socket, run.status, run.summary):
        stale.unlink(missing_ok=True)  # a former controller's
    atomic_write(run.token, secrets.token_hex(32).encode(), mode=0o600)
    atomic_write(run.plan, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
    seeds, sources = {"run": config.seed}, plugin_sources(current)
    write_lock(run, write_config(run, current), seeds, sources, interpreters(config))


def interpreters(config: AnyConfig | ServeConfig) -> dict[str, dict[str, str]]:
    """What an engine under a Python of its own has there, as its plugin's `versions()` tells."""
    engine = getattr(config, "engine", None)
    versions = getattr(engine.build(), "versions", None) if engine is not None else None
    return {"engine": dict(versions())} if versions is not None else {}


def note_failure(run: RunDir, cause: str) -> None:
    """Correct what the controller wrote: told to stop because another role had died, it took the run for stopped."""
    import msgspec

    from prl.store.files import atomic_write

    for path, key, why in ((run.status, "state", "failed_reason"), (run.summary, "outcome", "reason")):
        document = runs.read_json(path)
        if document and document.get(key) not in ("failed", "completed"):
            document.update({key: "failed", why: cause})
            atomic_write(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def plugin_sources(config: dict[str, Any]) -> dict[str, bytes]:
    """Contents of the files that plugins are named by, so that a run can tell whether they have changed."""
    from prl import files

    tables = [table for value in config.values() for table in (value if isinstance(value, list) else [value])]
    names = [table["use"] for table in tables if isinstance(table, dict) and isinstance(table.get("use"), str)]
    paths = [Path(name.rpartition(":")[0]) for name in names if files.is_reference(name)]
    return {str(path): path.read_bytes() for path in paths}


def _differences(former: Any, current: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(former, dict) and isinstance(current, dict):
        for key in sorted(former.keys() | current.keys()):
            yield from _differences(former.get(key), current.get(key), f"{prefix}.{key}" if prefix else key)
    elif former != current:
        yield f"{prefix} ({former} -> {current})"


def show_plan(config: AnyConfig, *, as_json: bool) -> None:
    """What `--dry-run` prints: which processes would be started, and nothing is written."""
    from prl import planning

    run = run_dir(config)
    print_plan(run, planning.build_plan(config, run), as_json=as_json)


def print_plan(run: RunDir, plan: Plan, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        roles = msgspec.to_builtins(plan.roles)
        output.emit_json({"run": run.name, "path": str(run.path), "exists": run.path.exists(), "roles": roles})
        return
    typer.echo(f"{run.path}{' (exists)' if run.path.exists() else ''}")
    output.table(
        [
            (role.name, f"x{role.replicas}", f"threads {role.resources.threads or 'auto'}", " ".join(role.command))
            for role in plan.roles
        ]
    )
