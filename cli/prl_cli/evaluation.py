"""The configuration of an evaluation: that of a run, with another model and no training step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prl.config.compose import Composition
from prl.config.load import load_config
from prl.config.schema import RunConfig
from prl.errors import ConfigError, UsageError
from prl.rundir import RunDir
from prl_cli import exporting, runs


def evaluation_config(
    target: str, checkpoint: str | None, *, tasks: int | None, sets: Sequence[str], runs_dir: Path | None
) -> RunConfig:
    """From a TOML file or a run, and what of it to evaluate.

    Raises:
        UsageError, ConfigError: there is no such run, checkpoint or file, or it is not a reinforcement-learning run.
    """
    source = None if _is_config(target) else runs.find(target, runs_dir)
    config = load_config([target], sets).config if source is None else _of_run(source, sets)
    model = _model(config, source, checkpoint, runs_dir)
    folder = runs_dir or (source.path.parent if source else Path(config.runs_dir))
    label = f"-{checkpoint}" if checkpoint and checkpoint.isdigit() else ""
    updates: dict[str, Any] = {
        "name": _free_name(folder, f"{config.name}-eval{label}"),
        "runs_dir": str(folder),
        "model": config.model.model_copy(update={"path": model}),
        "loop": config.loop.model_copy(update={"steps": 0}),
        "checkpoint": config.checkpoint.model_copy(update={"every": 0, "at_end": False}),
        "eval": config.eval.model_copy(update={"at_start": True, "at_end": False, "tasks": tasks or config.eval.tasks}),
    }
    if updates["eval"].tasks == 0:
        raise UsageError("eval.tasks is 0: say how many held-out tasks to evaluate with --tasks")
    return config.model_copy(update=updates)


def _is_config(target: str) -> bool:
    return target.endswith(".toml") or Path(target).is_file()


def _of_run(run: RunDir, sets: Sequence[str]) -> RunConfig:
    """The configuration a run was started with, and `sets` over it."""
    from prl import registry

    stored = exporting.stored_config(run)
    if not isinstance(stored, RunConfig):
        raise UsageError(
            f"run {run.name!r} is a supervised one and has no environments: evaluate it with a configuration, "
            f"`prl eval CONFIG --checkpoint {run.path}/exports/...` after `prl export`"
        )
    if not sets:
        return stored
    changes = Composition([], sets)
    if changes.unreadable:
        raise ConfigError(changes.unreadable)
    merged = _merged(json.loads(stored.model_dump_json()), changes.data)
    try:
        return registry.validate_strictly(RunConfig, merged)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        both[key] = _merged(base[key], value) if nested else value
    return both


def _model(config: RunConfig, source: RunDir | None, checkpoint: str | None, runs_dir: Path | None) -> str:
    """Folder or hub name of the model to evaluate."""
    if checkpoint is not None and not checkpoint.isdigit():
        if not (Path(checkpoint) / "config.json").is_file():
            raise UsageError(f"--checkpoint {checkpoint}: neither a step nor a model folder (it has no config.json)")
        return str(Path(checkpoint).resolve())
    if source is None:
        if checkpoint is None:
            return config.model.path
        source = runs.find(config.name, runs_dir or Path(config.runs_dir))
    return str(exporting.exported(source, None if checkpoint is None else int(checkpoint)).resolve())


def _free_name(folder: Path, wanted: str) -> str:
    candidates = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
    return next(name for name in candidates if not (folder / name).exists())
