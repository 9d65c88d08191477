"""`prl serve`: what is to be served, and what a person is told about it."""

from __future__ import annotations

import itertools
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from prl.config.compose import Composition
from prl.config.load import load_config
from prl.config.schema import ServeConfig
from prl.errors import ConfigError, UsageError
from prl.rundir import RunDir
from prl_cli import exporting, failure, launching, output, runs

if TYPE_CHECKING:
    from prl.plan import LaunchState

LINE_EVERY_S = 15.0
"""A start of which there is nothing new to tell says so that often."""
READ = ("seed", "model", "engine", "launcher")
"""The keys of a run that serving one of its checkpoints takes over."""


def serving_config(
    target: str | None,
    checkpoint: str | None,
    *,
    engine: str | None,
    replicas: int | None,
    port: int | None,
    sets: Sequence[str],
    runs_dir: Path | None,
    start: bool = False,
) -> ServeConfig:
    """From a model, a TOML file or a run's checkpoint, and the options over it. `start`: it is about to be served.

    Raises:
        UsageError: there is nothing to serve, or no such run. ConfigError: with every problem.
    """
    if target is None and checkpoint is None:
        raise UsageError("say what to serve: a model's folder, a configuration, or a run with --ckpt RUN")
    base: dict[str, Any] = {}
    files = [target] if target is not None and target.endswith(".toml") else []
    label = Path(target).name if target is not None else ""
    folder = runs_dir
    if target is not None and not files:
        if checkpoint is not None:
            raise UsageError(f"{target} and --ckpt {checkpoint} are two models: choose one")
        base = {"model": {"path": target}}
    if checkpoint is not None:
        run, step = _run_and_step(checkpoint, runs_dir)
        if not files:
            stored = exporting.stored_config(run).model_dump(mode="json")
            base = {key: stored[key] for key in READ if key in stored}
            base.setdefault("engine", {"use": "vllm"})
        label, folder = f"{run.name}-{step}", folder or run.path.parent
        sets = [*sets, f"model.path={_toml(str(exporting.exported(run, step).resolve()))}"]
    if engine is not None:
        base, files = _with_engine(engine, base, files)
    options = {"engine.replicas": replicas, "engine.api_port": port}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    config = load_config(files, [*sets, *given], ServeConfig, base=base, start=start).config
    folder = folder or Path(config.runs_dir)
    named = any(expression.partition("=")[0].strip() == "name" for expression in sets)
    wanted = config.name if named else _name(label or Path(config.model.path).name)
    return config.model_copy(update={"runs_dir": str(folder), "name": wanted if named else _free(folder, wanted)})


def _run_and_step(checkpoint: str, runs_dir: Path | None) -> tuple[RunDir, int]:
    """The run and step of "RUN[:STEP]".

    Raises:
        UsageError: no such run, or it has no checkpoint.
    """
    name, _, number = checkpoint.rpartition(":")
    if not name or not number.isdecimal():
        name, number = checkpoint, ""
    run = runs.find(name, runs_dir)
    return run, exporting.chosen_step(run, int(number) if number else None)


def _with_engine(engine: str, base: dict[str, Any], files: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Another engine than the configuration's knows none of the keys beside `use` there: they are left out."""
    data = base
    if files:
        composition = Composition(files, [])
        if composition.unreadable:
            raise ConfigError(composition.unreadable)
        data = composition.data
    table = data.get("engine")
    if isinstance(table, dict) and table.get("use", "embedded") != engine:
        core = {key: table[key] for key in ("replicas", "threads") if key in table}
        return {**data, "engine": {"use": engine, **core}}, []
    return {**base, "engine": {**(table if isinstance(table, dict) and not files else {}), "use": engine}}, files


def _toml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _name(label: str) -> str:
    return "serve-" + (re.sub(r"[^A-Za-z0-9_.-]+", "-", label.removesuffix(".toml")).strip("-.") or "model")


def _free(folder: Path, wanted: str) -> str:
    """The first of "NAME", "NAME-2", ... that is not there, or was served from and is over."""
    names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not (folder / name).exists() or _is_over(RunDir(folder / name)))


def _is_over(run: RunDir) -> bool:
    return is_serving(run) and not runs.is_alive(run)


def is_serving(run: RunDir) -> bool:
    """Whether a run directory is one of `prl serve`."""
    roles = runs.read_json(run.plan).get("roles") or []
    return any("prl.controller.serving" in role.get("command", ()) for role in roles)


def show_plan(config: ServeConfig, *, as_json: bool) -> None:
    from prl import planning

    run = launching.run_dir(config)
    launching.print_plan(run, planning.build_serving_plan(config.run_config(), run), as_json=as_json)


def serve(config: ServeConfig, *, quiet: bool = False, as_json: bool = False) -> int:
    """Serve until Ctrl-C or `prl stop`. Returns the exit code: 0, 1, 3, or 130 after a second Ctrl-C.

    Raises:
        UsageError: the run directory is in use. ConfigError, PluginError, EnvironmentNotFit: before anything was
            written.
    """
    from prl import planning

    run = launching.run_dir(config)
    engines = config.run_config()
    plan = planning.build_serving_plan(engines, run)
    launcher = config.launcher.build()
    launching.fit(launcher, plan)
    existing = launching.Existing(clean=True, yes=True) if _is_over(run) else launching.Existing()
    announcer = Announcer(run, config.engine.replicas, quiet=quiet, as_json=as_json)
    with ExitStack() as stack:
        stack.enter_context(launching.claimed(run, existing))
        failure.keep_tracebacks_in(run.logs)
        launching.write_inputs(run, engines, plan)
        code = int(launcher.run(plan, run, announcer.on_tick))
        if announcer.cause and code not in (0, 130):
            launching.note_failure(run, announcer.cause)
    if code == 0 and not quiet:
        output.say(f"{run.name}: stopped; logs are in {run.logs}")
    return code


class Announcer:
    """Says where each engine answers, once it does; the launcher's `on_tick` drives it."""

    def __init__(
        self, run: RunDir, replicas: int, *, quiet: bool, as_json: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cause = ""
        self._run = run
        self._replicas = replicas
        self._quiet = quiet
        self._json = as_json
        self._clock = clock
        self._said = float("-inf")
        self._told: set[tuple[str, int]] = set()
        self._complete = False
        if not quiet:
            output.say(f"run directory {run.path}")

    def on_tick(self, state: LaunchState) -> None:
        self.cause = state.cause or self.cause
        status = runs.read_json(self._run.status)
        engines = {
            label: (int(role.get("pid", 0)), role["info"])
            for label, role in sorted((status.get("roles") or {}).items())
            if (role.get("info") or {}).get("api")
        }
        if self._json:
            self._emit(status, engines)
        else:
            for label, (pid, info) in engines.items():
                if (label, pid) not in self._told:
                    self._told.add((label, pid))
                    typer.echo(engine_lines(label, info, self._run.token))
        self._remark(status, state)

    def _emit(self, status: dict[str, Any], engines: dict[str, tuple[int, dict[str, Any]]]) -> None:
        """One object, when all of them serve."""
        if self._complete or status.get("state") != "running" or len(engines) < self._replicas:
            return
        self._complete = True
        told = [
            {"engine": label, "api": info["api"], "model": info.get("model")} for label, (_, info) in engines.items()
        ]
        output.emit_json(
            {"run": self._run.name, "path": str(self._run.path), "key_file": str(self._run.token), "engines": told}
        )

    def _remark(self, status: dict[str, Any], state: LaunchState) -> None:
        now = self._clock()
        if self._quiet or self._complete or now - self._said < LINE_EVERY_S or state.phase != "running":
            return
        if status.get("state") == "running":
            self._complete = not self._json or self._complete
            output.say("serving; Ctrl-C ends it")
            return
        self._said = now
        output.say(f"starting: {status.get('waiting_for') or 'the controller'}")


def engine_lines(label: str, info: dict[str, Any], key: Path) -> str:
    """Where an engine answers, and a request to try."""
    api, model = str(info["api"]), str(info.get("model", ""))
    shown = shlex.quote(str(key))
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 64}}'
    curl = (
        f'curl {api}/chat/completions -H "Authorization: Bearer $(cat {shown})" '
        f"-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    )
    return f"{label}  {api}  model {model}  key {key}\n  {curl}"
