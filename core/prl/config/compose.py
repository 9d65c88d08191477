"""Composition: TOML files laid over one another from left to right, then `--set key=value`, with every value's origin.

Tables merge key by key; anything else, arrays included, is replaced as a whole. `--set envs.0.weight=2` reaches into an
array. A value of `--set` is TOML, or a bare text where it is no TOML: `--set name=first --set 'envs=[{use="jsonl"}]'`.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Any

from prl.config.positions import Path, Place, scan

_KEY_AND_VALUE = re.compile(r"""((?:"[^"]*"|'[^']*'|[^="'])*)=(.*)""", re.DOTALL)
_DOTS_OUTSIDE_QUOTES = re.compile(r"""\.(?=(?:[^"']*["'][^"']*["'])*[^"']*$)""")


@dataclass(frozen=True)
class Origin:
    """Where a value was written.

    Args:
        source: a file as it was named, or "--set".
        place: position within it.
        lines: the source's text, or the one expression after `--set`.
        replaces: what it took precedence over.
    """

    source: str
    place: Place
    lines: tuple[str, ...]
    replaces: Origin | None = None

    def __str__(self) -> str:
        if self.source == "--set":
            return f"--set {self.lines[0]}"
        line, column = self.place.value
        return f"{self.source}:{line}:{column}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    Args:
        key: the key it concerns, as a path or dotted; "" is the whole.
        message: what is wrong, the value, the limit, the remedy.
        at: whether the caret stands under the key or its value.
        severity: a warning is shown and stops nothing.
    """

    key: str | Path
    message: str
    at: str = "value"
    severity: str = "error"

    @property
    def path(self) -> Path:
        return split(self.key) if isinstance(self.key, str) else self.key

    def __str__(self) -> str:
        key = dotted(self.path)
        return f"{key}: {self.message}" if key else self.message


class Composition:
    """Sources laid over one another: the data, where each value stands, and what could not be read."""

    def __init__(self, files: Sequence[File | str], sets: Sequence[str], base: Mapping[str, Any] | None = None) -> None:
        """`base` lies below the files: values that nobody wrote into one."""
        self.data: dict[str, Any] = copy.deepcopy(dict(base or {}))
        self.origins: dict[Path, Origin] = {}
        self.unreadable: list[str] = []
        self.files = [str(file) for file in files]
        for file in files:
            self._add_file(File(file))
        for expression in sets:
            self._add_set(expression)

    # --- sources ------------------------------------------------------------------------------------------

    def _add_file(self, file: File) -> None:
        try:
            text = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
        except FileNotFoundError:
            return self.unreadable.append(f"{file}: error: there is no such file")
        except (OSError, UnicodeDecodeError) as error:
            return self.unreadable.append(f"{file}: error: cannot be read: {error}")
        lines = tuple(text.split("\n"))
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            line, column, message = _syntax(str(error), lines)
            return self.unreadable.append(excerpt(str(file), (line, column), lines, f"not valid TOML: {message}"))
        except RecursionError:
            return self.unreadable.append(f"{file}: error: arrays or tables are nested too deeply to be read")
        places = scan(text)
        origins = {path: Origin(str(file), place, lines) for path, place in places.items()}
        self._overlay(self.data, data, (), origins)

    def _add_set(self, expression: str) -> None:
        match = _KEY_AND_VALUE.fullmatch(expression)
        key, equals, raw = (match[1], "=", match[2]) if match else expression.partition("=")
        names = split(key.strip())
        if not equals or not names or "" in names:
            return self._bad_set(expression, 1, "is not of the form key=value")
        column = len(key) + 2 + len(raw) - len(raw.lstrip())
        try:
            value, nested = _value(raw)
        except ValueError as error:
            return self._bad_set(expression, column, str(error))
        try:
            container, path = self._reach(names)
        except LookupError as error:
            return self._bad_set(expression, 1, str(error.args[0]))
        whole = Origin("--set", Place((1, 1), (1, column)), (expression,))
        for depth in range(1, len(path)):
            self.origins.setdefault(path[:depth], whole)
        origins = {path: whole, **{(*path, *below): whole for below in nested}}
        if isinstance(container, list):
            self._forget(path, origins)
            container[path[-1]] = value  # type: ignore[index]
            self.origins.update(origins)
        else:
            self._overlay(container, {path[-1]: value}, path[:-1], origins)

    def _bad_set(self, expression: str, column: int, message: str) -> None:
        self.unreadable.append(excerpt("--set", (1, column), (expression,), message))

    def _reach(self, names: Path) -> tuple[dict[str, Any] | list[Any], Path]:
        """The table or array that holds the last of `names`, and its whole path. Missing tables are made."""
        here: Any = self.data
        path: Path = ()
        for name in names[:-1]:
            step = _step(here, name, path)
            if isinstance(here, dict):
                here.setdefault(step, {})
            here = here[step]
            path = (*path, step)
        last = _step(here, names[-1], path)
        return here, (*path, last)

    # --- merging ------------------------------------------------------------------------------------------

    def _overlay(self, target: Any, new: dict[Any, Any], path: Path, origins: dict[Path, Origin]) -> None:
        for key, value in new.items():
            below = (*path, key)
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                if below in origins:
                    self.origins.setdefault(below, origins[below])
                self._overlay(target[key], value, below, origins)
                continue
            self._forget(below, origins)
            target[key] = copy.deepcopy(value)
            self.origins.update({found: origin for found, origin in origins.items() if found[: len(below)] == below})

    def _forget(self, path: Path, origins: dict[Path, Origin]) -> None:
        """Drop the origins of what is about to be replaced, but remember what the new value replaced."""
        former = self.origins.get(path)
        for found in [found for found in self.origins if found[: len(path)] == path]:
            del self.origins[found]
        if former is not None and path in origins:
            origins[path] = replace(origins[path], replaces=former)

    # --- reporting ----------------------------------------------------------------------------------------

    def locate(self, path: Path) -> Origin | None:
        """The origin of a key, or of the nearest table around it; None if nothing around it was written."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path)

    def render(self, problem: Problem) -> str:
        """`file:line:column: error: key: message`, the line, and a caret."""
        origin = self.locate(problem.path)
        if origin is None:
            return f"{' '.join(self.files)}{': ' if self.files else ''}{problem.severity}: {problem}"
        exact = problem.path in self.origins
        place = origin.place.key if problem.at == "key" or not exact else origin.place.value
        return excerpt(origin.source, place, origin.lines, str(problem), problem.severity)


def excerpt(source: str, place: tuple[int, int], lines: Sequence[str], message: str, severity: str = "error") -> str:
    line, column = place
    where = source if source == "--set" else f"{source}:{line}:{column}"
    text = lines[line - 1] if line <= len(lines) else ""
    margin = "     " if source == "--set" else f"{line:5d}"
    indent = re.sub(r"[^\t]", " ", text[: column - 1]).ljust(column - 1)
    return f"{where}: {severity}: {message}\n{margin} | {text}\n      | {indent}^"


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def split(key: str) -> Path:
    """ "envs.0.weight" as ("envs", 0, "weight"). A part in quotes may hold dots."""
    if not key:
        return ()
    names = [part.strip().strip("\"'") for part in _DOTS_OUTSIDE_QUOTES.split(key)]
    return tuple(int(name) if name.isdecimal() else name for name in names)


def _step(here: Any, name: str | int, path: Path) -> str | int:
    """`name` as a key of a table or an index of an array."""
    if isinstance(here, dict):
        return str(name)
    if not isinstance(here, list):
        raise LookupError(f"{dotted(path)} is {here!r}, not a table, so it has no key {name!r}")
    if not isinstance(name, int):
        raise LookupError(
            f"{dotted(path)} is an array: write {dotted(path)}.0.{name}, or another number, for one of it"
        )
    if name >= len(here):
        raise LookupError(
            f"{dotted(path)} has {len(here)} entries, counted from 0, so there is no {dotted(path)}.{name}"
        )
    return name


def _value(raw: str) -> tuple[Any, list[Path]]:
    """The value after `=`, and the paths within it. Text that is no TOML is a string, unless it set out to be more."""
    raw = raw.strip()
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as error:
        if raw[:1] in ("[", "{", '"', "'"):
            raise ValueError(f"the value is not valid TOML: {str(error).partition(' (at ')[0]}") from None
        return raw, []
    except RecursionError:
        raise ValueError("the value is nested too deeply to be read") from None
    if list(parsed) != ["value"]:
        raise ValueError("the value holds more than one line of TOML")
    return parsed["value"], [path[1:] for path in scan(f"value = {raw}") if len(path) > 1]


def _syntax(message: str, lines: Sequence[str]) -> tuple[int, int, str]:
    """tomllib's message as line, column and text."""
    text, _, where = message.rpartition(" (at ")
    match = re.match(r"line (\d+), column (\d+)", where)
    if match:
        return int(match[1]), int(match[2]), text
    last = max(len(lines) - (len(lines) > 1 and lines[-1] == ""), 1)
    return last, len(lines[last - 1]) + 1, text or message
