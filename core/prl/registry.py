"""Finding plugins: three grains, each of which costs more than the one before.

1. `names(kind)`: what is installed, from package metadata. Nothing of a plugin is imported.
2. `describe(kind, name)`: its `Contribution`, from the light `plugin.py`. Validates a configuration without torch.
3. `build(kind, name, table)`: imports the factory and calls it with the validated table, in the process that needs it.

A name may also be a file, "./my_env.py:MyEnv": see `prl.files`. What is wrong with a plugin (two distributions claim
its name, it cannot be imported, it was written for another interface) is an error only for a run that uses it.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prl import files
from prl.contribution import API_VERSION, KINDS, Contribution, PluginConfig
from prl.errors import ConfigError, PluginApiMismatch, PluginBroken, PluginConflict, PluginError, PluginMissing

_SINGULAR = {"envs": "environment", "losses": "loss"}
Model = TypeVar("Model", bound=BaseModel)
_overrides: dict[tuple[str, str], Contribution] = {}


@dataclass(frozen=True)
class Entry:
    """One installed plugin, as package metadata tells it.

    Args:
        value: what its entry point points at, "package.plugin:NAME".
        distribution, version: the package that brings it.
        others: further distributions that claim the same name; using it is an error while there are any.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    """An installed plugin with its declaration, or the reason why there is none."""

    entry: Entry
    contribution: Contribution | None
    problem: str = ""


# --- names ------------------------------------------------------------------------------------------------


def names(kind: str) -> dict[str, Entry]:
    """Every plugin of a kind by name, sorted, without importing any."""
    _check_kind(kind)
    found = dict(_installed()[kind])
    for (other, name), contribution in _overrides.items():
        if other == kind:
            found[name] = Entry(kind, name, contribution.factory, "override", "")
    return dict(sorted(found.items()))


@functools.cache
def _installed() -> dict[str, dict[str, Entry]]:
    """Scanning the metadata of every package costs tens of milliseconds, so it is done once."""
    found: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
    everything = entry_points()
    for kind in KINDS:
        for point in everything.select(group=f"prl.{kind}"):
            entry = _entry(kind, point)
            known = found[kind].get(point.name)
            if known is not None:
                others = (*known.others, entry.distribution)
                entry = Entry(kind, known.name, known.value, known.distribution, known.version, others)
            found[kind][point.name] = entry
    return found


def _entry(kind: str, point: EntryPoint) -> Entry:
    dist = point.dist
    return Entry(kind, point.name, point.value, dist.name if dist else "unknown", dist.version if dist else "")


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PluginMissing(f"there is no kind of plugin called {kind!r}; the kinds are {', '.join(KINDS)}")


# --- declarations -----------------------------------------------------------------------------------------


def describe(kind: str, name: str, *, base: Path | None = None) -> Contribution:
    """The declaration of one plugin.

    Args:
        name: an installed name, or "./file.py:Name" relative to `base` (the working directory when None).

    Raises:
        PluginMissing, PluginConflict, PluginBroken, PluginApiMismatch.
    """
    _check_kind(kind)
    if files.is_reference(name):
        contribution = files.load(kind, name, base)
    elif (kind, name) in _overrides:
        contribution = _overrides[kind, name]
    else:
        contribution = _declaration(_find(kind, name))
    if contribution.api_version != API_VERSION:
        raise PluginApiMismatch(
            f"{_label(kind, name)} was written for version {contribution.api_version} of the plugin interface and this "
            f"prl has version {API_VERSION}: {_other_release(kind, name, contribution.api_version)}"
        )
    return contribution


def listing(kind: str) -> list[Listing]:
    """Every plugin of a kind with its declaration; a broken one with its reason. Imports each `plugin.py`."""
    return [_listed(entry) for entry in names(kind).values()]


def _listed(entry: Entry) -> Listing:
    try:
        return Listing(entry, describe(entry.kind, entry.name))
    except PluginError as error:
        return Listing(entry, None, str(error))


def _find(kind: str, name: str) -> Entry:
    entry = names(kind).get(name)
    if entry is None:
        raise PluginMissing(_missing(kind, name))
    if entry.others:
        rivals = ", ".join(sorted({entry.distribution, *entry.others}))
        raise PluginConflict(
            f"{_label(kind, name)} is provided by more than one distribution: {rivals}; uninstall all but one of them"
        )
    return entry


def _declaration(entry: Entry) -> Contribution:
    label = f"{_label(entry.kind, entry.name)} of {entry.distribution} {entry.version}"
    try:
        found = EntryPoint(entry.name, entry.value, f"prl.{entry.kind}").load()
    except Exception as error:
        raise PluginBroken(f"{label} cannot be imported from {entry.value}: {_reason(error)}") from error
    if not isinstance(found, Contribution):
        raise PluginBroken(f"{label}: {entry.value} is a {type(found).__name__}, where a Contribution is expected")
    return found


def _missing(kind: str, name: str) -> str:
    """What was asked, the nearest match, what is installed, and the line that would bring it."""
    known = names(kind)
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if "/" in name or name.endswith(".py"):
        hint = " What a file defines is written ./file.py:Name."
    installed = f"installed: {', '.join(known)}" if known else "none is installed"
    return (
        f"no {_singular(kind)} is called {name!r}.{hint} {installed[0].upper()}{installed[1:]}. "
        "`prl plugins install PACKAGE` brings what a package provides"
    )


def _other_release(kind: str, name: str, version: int) -> str:
    if files.is_reference(name) or (kind, name) in _overrides:
        return f"adapt it, and set api_version={API_VERSION}"
    package = names(kind)[name].distribution
    return f"install a {'newer' if version < API_VERSION else 'older'} release of {package}, or another release of prl"


def _singular(kind: str) -> str:
    return _SINGULAR.get(kind, kind.removesuffix("s"))


def _label(kind: str, name: str) -> str:
    return f"the {_singular(kind)} {name!r}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# --- configurations and factories -------------------------------------------------------------------------


def plugin_config(kind: str, name: str, table: Mapping[str, Any], *, base: Path | None = None) -> PluginConfig:
    """The plugin's own table, validated.

    Raises:
        PluginError: the plugin cannot be used. ConfigError: its table is wrong; every problem at once.
    """
    contribution = describe(kind, name, base=base)
    try:
        return validate_strictly(contribution.config, table)
    except ValidationError as error:
        label = _label(kind, name)
        raise ConfigError([f"{label}: {_key(problem)}: {problem['msg']}" for problem in error.errors()]) from error


def _key(problem: ErrorDetails) -> str:
    """Where a problem is: what `contribution.wrong` names, or where pydantic found it."""
    where = [*map(str, problem["loc"])]
    if problem["type"] == "prl":
        where.append(problem["ctx"]["key"])
    return ".".join(where)


def build(kind: str, name: str, table: Mapping[str, Any] | None = None, *, base: Path | None = None) -> Any:
    """Import the plugin's factory and call it with its validated table.

    Raises:
        PluginError, ConfigError. What the factory itself raises on being called comes through as it is.
    """
    config = plugin_config(kind, name, table or {}, base=base)
    try:
        factory = describe(kind, name, base=base).load_factory()
    except Exception as error:
        raise PluginBroken(
            f"the implementation of {_label(kind, name)} cannot be imported: {_reason(error)}"
        ) from error
    return factory(config)


def validate_strictly(schema: type[Model], data: Mapping[str, Any]) -> Model:
    """Validate in pydantic's strict JSON mode: neither "100" nor true is a number, but a list may fill a tuple."""
    return schema.model_validate_json(json.dumps(data, default=str), strict=True)


# --- for tests --------------------------------------------------------------------------------------------


def refresh() -> None:
    """Forget what was read of the installed packages: something was installed or removed while this process ran."""
    _installed.cache_clear()


@contextmanager
def override(kind: str, name: str, contribution: Contribution) -> Iterator[Contribution]:
    """Let a contribution stand in for an installed plugin, or add one, for the length of a test."""
    _check_kind(kind)
    before = _overrides.get((kind, name))
    _overrides[kind, name] = contribution
    try:
        yield contribution
    finally:
        if before is None:
            del _overrides[kind, name]
        else:
            _overrides[kind, name] = before
