"""Reading a configuration: compose, validate, check; every problem at once, each with its place.

1. TOML files from left to right and `--set`s are laid over one another (`prl.config.compose`).
2. The core's tables are validated, each plugin's keys with the plugin's own schema, and its defaults are filled in.
3. Rules across tables (`prl.config.checks`) and installed hooks (`prl_check_config`) may refuse.

The result is written to the run directory (`prl.store.lock.write_config`), and every role reads it back with
`read_resolved`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from prl import files, registry
from prl.config.checks import check, check_start
from prl.config.compose import Composition, Origin, Problem, dotted
from prl.config.positions import Path as KeyPath
from prl.config.problems import plugin_tables, translate
from prl.config.schema import PluginTable, RunConfig, Table
from prl.contribution import PluginConfig
from prl.errors import ConfigError, PluginError

Config = TypeVar("Config", bound=Table)


@dataclass(frozen=True)
class LoadedConfig(Generic[Config]):
    """A configuration that may be run.

    Args:
        config: everything filled in.
        origins: where each key that somebody wrote was written, by its dotted path; the rest are defaults.
        warnings: what is allowed but probably not meant, ready to be shown.
    """

    config: Config
    origins: dict[str, Origin]
    warnings: list[str] = field(default_factory=list)

    def origin(self, key: str) -> str:
        """ "run.toml:3:8", "--set loop.steps=3", or "default"."""
        found = self.origins.get(key)
        return str(found) if found is not None else "default"


def load_config(
    paths: Sequence[Path | str],
    sets: Sequence[str] = (),
    schema: type[Config] = RunConfig,  # type: ignore[assignment]
    *,
    base: Mapping[str, Any] | None = None,
    checks: bool = True,
    start: bool = False,
) -> LoadedConfig[Config]:
    """Read, compose and check a configuration.

    Args:
        base: what lies below the files.
        checks: also apply the rules across tables, which look at files, and the installed hooks.
        start: something is about to be started with it: also find out what takes a while (`checks.check_start`).

    Raises:
        ConfigError: with every problem, each as "file:line:column: error: key: message", the line and a caret.
    """
    composition = Composition(paths, sets, base)
    if composition.unreadable:
        raise ConfigError(composition.unreadable)
    _make_references_absolute(composition.data, schema)
    config = _validate(composition, schema)
    problems: list[Problem] = []
    if checks:
        problems = [*check(config), *_hook_problems(config)]
    errors = [problem for problem in problems if problem.severity == "error"]
    if start and not errors:
        errors = check_start(config)
    if errors:
        raise ConfigError(_rendered(composition, errors))
    origins = {dotted(path): origin for path, origin in composition.origins.items()}
    return LoadedConfig(config, origins, _rendered(composition, problems))


def _validate(composition: Composition, schema: type[Config]) -> Config:
    """Core and plugins' tables together, so that the problems of both are reported."""
    problems: list[Problem] = []
    filled = _fill_plugin_tables(composition.data, schema, problems)
    try:
        config = registry.validate_strictly(schema, filled)
    except ValidationError as error:
        problems = [*translate(error, schema), *problems]
    if problems:
        raise ConfigError(_rendered(composition, problems))
    return config


def read_resolved(path: Path, schema: type[Config]) -> Config:
    """The config.json of a run, for one of its roles. Plugins' tables are validated where they are used.

    Raises:
        ConfigError: it is not there, or not what this release of prl writes.
    """
    try:
        return registry.validate_strictly(schema, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError([f"{path}: error: there is no such file, so this is no run directory"]) from None
    except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
        problems = [str(p) for p in translate(error, schema)] if isinstance(error, ValidationError) else [str(error)]
        raise ConfigError([f"{path}: error: {problem}" for problem in problems]) from error


# --- plugins' tables --------------------------------------------------------------------------------------


def _raw_tables(
    data: dict[str, Any], schema: type[BaseModel]
) -> Iterator[tuple[KeyPath, dict[str, Any], type[PluginTable]]]:
    """Every plugin's table as it was written; one that was left out is empty. What is no table is skipped: the
    schema reports it."""
    for key, table_type, many in plugin_tables(schema):
        tables = data.get(key, [] if many else {})
        found: list[tuple[KeyPath, Any]] = [((key,), tables)]
        if many:
            found = [((key, index), table) for index, table in enumerate(tables)] if isinstance(tables, list) else []
        for path, table in found:
            if isinstance(table, dict):
                yield path, table, table_type


def _make_references_absolute(data: dict[str, Any], schema: type[BaseModel]) -> None:
    """ "./my_env.py:MyEnv" is relative to the working directory, which a role of the run need not share."""
    for _, table, _ in _raw_tables(data, schema):
        name = table.get("use")
        if isinstance(name, str) and files.is_reference(name):
            table["use"] = files.absolute(name)


def _fill_plugin_tables(data: dict[str, Any], schema: type[BaseModel], problems: list[Problem]) -> dict[str, Any]:
    """The data with each plugin's defaults beside the keys that were given. Adds what is wrong to `problems`."""
    filled = {key: list(value) if isinstance(value, list) else value for key, value in data.items()}
    for path, table, table_type in _raw_tables(data, schema):
        resolved = _resolve_plugin_table(path, table, table_type, schema, problems)
        if resolved is None:
            continue
        container: Any = filled if len(path) == 1 else filled[str(path[0])]
        container[path[-1]] = resolved
    return filled


def _resolve_plugin_table(
    path: KeyPath,
    table: dict[str, Any],
    table_type: type[PluginTable],
    schema: type[BaseModel],
    problems: list[Problem],
) -> dict[str, Any] | None:
    core = {key: value for key, value in table.items() if key in table_type.model_fields}
    own = {key: value for key, value in table.items() if key not in table_type.model_fields}
    name = table.get("use", _default_use(path, table_type, schema))
    if not isinstance(name, str):
        return None
    try:
        contribution = registry.describe(table_type.kind, name)
        config = registry.validate_strictly(contribution.config, own)
    except PluginError as error:
        problems.append(Problem((*path, "use"), str(error) + ("" if "use" in table else " (the default)")))
        return None
    except ValidationError as error:
        problems.extend(translate(error, contribution.config, path, also=tuple(table_type.model_fields), root=schema))
        return None
    return {"use": name, **core, **_dump(config)}


def _default_use(path: KeyPath, table_type: type[PluginTable], schema: type[BaseModel]) -> Any:
    default = schema.model_fields[str(path[0])].default
    if isinstance(default, PluginTable):
        return default.use
    return table_type.model_fields["use"].default


def _dump(config: PluginConfig) -> dict[str, Any]:
    """As JSON. A table made of a function's parameters may have defaults that JSON cannot hold: they stay unsaid."""
    try:
        return config.model_dump(mode="json")
    except PydanticSerializationError:
        return config.model_dump(mode="json", exclude_unset=True)


# --- checks and reports -----------------------------------------------------------------------------------


def _hook_problems(config: Table) -> list[Problem]:
    from prl.hooks import check_config

    return check_config(config)


def _rendered(composition: Composition, problems: list[Problem]) -> list[str]:
    """Problems in the order of their places, each once."""
    sources = [*composition.files, "--set"]

    def order(problem: Problem) -> tuple[Any, ...]:
        origin = composition.locate(problem.path)
        if origin is None:
            return (len(sources), 0, 0)
        return (sources.index(origin.source), *origin.place.key)

    return list(dict.fromkeys(composition.render(problem) for problem in sorted(problems, key=order)))
