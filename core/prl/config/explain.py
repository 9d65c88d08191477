"""`prl config explain KEY`: what a key means, what it may be, what it is, and where that was written."""

from __future__ import annotations

import textwrap
import typing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from prl import registry
from prl.config.compose import dotted, split
from prl.config.load import LoadedConfig
from prl.config.positions import Path
from prl.config.problems import fields, first_line, plugin_tables, table_at, unknown_key
from prl.config.schema import PluginTable, RunConfig
from prl.errors import ConfigError, PluginError

_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}
_LIMITS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most", "pattern": "matching"}


def explain(key: str, loaded: LoadedConfig[Any] | None = None, schema: type[BaseModel] = RunConfig) -> str:
    """A few lines about one key, table, or (for "") the whole configuration.

    Args:
        key: "loop.max_staleness", "engine.use", "envs.length", "envs.0.length"; "envs.jsonl" and "envs.jsonl.path"
            are of an installed plugin by its name.
        loaded: a configuration, to show the value of the key and choose the plugins whose keys are explained.

    Raises:
        ConfigError: there is no such key; names the nearest.
    """
    path = split(key)
    table = _plugin_table(path, schema)
    named = _plugin_by_name(path, table)
    if table is not None and named is not None and len(path) == 2:
        return _explain_table(path, table, named)
    if named is not None and len(path) == 3:
        if path[2] not in named.model_fields:
            raise _unknown(path, list(named.model_fields), schema)
        return _explain_field(path, named.model_fields[str(path[2])], None)
    if table is not None and len(path) > 1 and isinstance(path[-1], str):
        return _explain_plugin_key(path, table, loaded, schema)
    inner = table_at(schema, path)
    if inner is not None:
        return _explain_table(path, inner, _plugin_of(path, inner, loaded, schema))
    parent = table_at(schema, path[:-1])
    if parent is None or path[-1] not in parent.model_fields:
        raise _unknown(path, fields(schema, path[:-1]), schema)
    return _explain_field(path, parent.model_fields[str(path[-1])], loaded)


def _explain_table(path: Path, table: type[BaseModel], plugin: type[BaseModel] | None) -> str:
    own = own_doc(table)
    lines = [dotted(path) or "the top level", *([f"  {own}"] if own else []), ""]
    known = {**table.model_fields, **(plugin.model_fields if plugin is not None else {})}
    width = max((len(name) for name in known), default=0)
    defaults = {name: _short_default(field) for name, field in known.items()}
    room = max((len(text) for text in defaults.values()), default=0)
    for name, field in known.items():
        text = " ".join((field.description or own_doc(table_at(table, (name,)))).split())
        if plugin is not None and table_at(plugin, (name,)) is not None:
            text += f" A table: prl config explain {dotted((*path, name))}."
        start = f"  {name:{width}}  {defaults[name]:{room}}  " if room else f"  {name:{width}}  "
        # A line is no longer than those of the documentation, so that a terminal of that width breaks none.
        lines += textwrap.wrap(text, 120, initial_indent=start, subsequent_indent=" " * len(start)) or [start.rstrip()]
    return "\n".join(lines) + "\n"


def _explain_plugin_key(
    path: Path, table: type[PluginTable], loaded: LoadedConfig[Any] | None, schema: type[BaseModel]
) -> str:
    inside = tuple(part for part in path[1:] if isinstance(part, str))
    name = inside[0]
    if inside == ("use",):
        return _explain_field(path, table.model_fields["use"], loaded, _installed(table.kind))
    if inside[1:] == () and name in table.model_fields:
        return _explain_field(path, table.model_fields[name], loaded)
    plugin = _plugin_of(path[:1], table, loaded, schema)
    if plugin is None:
        plugins = ", ".join(f"{path[0]}.{item.entry.name}" for item in registry.listing(table.kind))
        raise ConfigError(
            [f"{dotted(path)}: say which plugin, as in {plugins}, or add a CONFIG: its keys depend on it"]
        )
    if name not in plugin.model_fields:
        raise _unknown((path[0], name), [*table.model_fields, *plugin.model_fields], schema)
    below = table_at(plugin, inside)
    if below is not None:
        return _explain_table(path, below, None)
    parent = table_at(plugin, inside[:-1])
    if parent is None or inside[-1] not in parent.model_fields:
        raise _unknown(path, fields(plugin, inside[:-1]), schema)
    return _explain_field(path, parent.model_fields[inside[-1]], loaded)


def _short_default(field: FieldInfo) -> str:
    """The default as a column shows it; nothing for a table, and none that is long."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    text = "" if isinstance(default, BaseModel | list) else toml_value(default)
    return text if len(text) <= 16 else "..."


def _explain_field(
    path: Path, field: FieldInfo, loaded: LoadedConfig[Any] | None, more: list[str] | None = None
) -> str:
    lines = [dotted(path)]
    lines += [f"  {line}".rstrip() for line in (field.description or "").strip().splitlines()]
    lines.append(f"  type      {', '.join([type_name(field.annotation), *_limits(field)])}")
    default = field.get_default(call_default_factory=True)
    if not isinstance(default, BaseModel):
        lines.append(f"  default   {'none: it is required' if default is PydanticUndefined else toml_value(default)}")
    if loaded is not None:
        found, value = _value_at(loaded.config.model_dump(mode="json"), path)
        if found:
            origin = loaded.origins.get(dotted(path))
            former = f", replaces {origin.replaces}" if origin is not None and origin.replaces is not None else ""
            lines.append(f"  value     {toml_value(value)}   ({loaded.origin(dotted(path))}{former})")
    lines += more or []
    return "\n".join(lines) + "\n"


def type_name(annotation: Any) -> str:
    """A type as somebody who writes TOML knows it."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if annotation in _TYPES:
        return _TYPES[annotation]
    if origin is Literal:
        return " or ".join(toml_value(argument) for argument in arguments)
    if origin in (list, tuple, set, frozenset):
        return f"array of {type_name(arguments[0])}" if arguments else "array"
    if origin is dict or annotation is dict:
        return "table"
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if arguments:
        return " or ".join(type_name(argument) for argument in arguments if argument is not type(None))
    if annotation is Any:
        return "anything"
    name = getattr(annotation, "__name__", str(annotation))
    return {"Path": "text (a path)"}.get(name, "table" if isinstance(annotation, type) else name)


def toml_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def own_doc(table: type[BaseModel] | None) -> str:
    """First line of a table's own docstring, not of one it inherits."""
    return first_line(table.__doc__) if table is not None and "__doc__" in vars(table) else ""


def _limits(field: FieldInfo) -> list[str]:
    return [
        f"{words} {getattr(item, name)}"
        for item in field.metadata
        for name, words in _LIMITS.items()
        if getattr(item, name, None) is not None
    ]


def _plugin_table(path: Path, schema: type[BaseModel]) -> type[PluginTable] | None:
    return next((table for key, table, _ in plugin_tables(schema) if path and key == path[0]), None)


def _plugin_by_name(path: Path, table: type[PluginTable] | None) -> type[BaseModel] | None:
    """The schema of an installed plugin named in the path itself, as in "envs.jsonl", unless that is a key."""
    if table is None or len(path) < 2 or path[1] in table.model_fields or path[1] not in registry.names(table.kind):
        return None
    try:
        return registry.describe(table.kind, str(path[1])).config
    except PluginError:
        return None


def _plugin_of(
    path: Path, table: type[BaseModel], loaded: LoadedConfig[Any] | None, schema: type[BaseModel]
) -> type[BaseModel] | None:
    """The schema of the plugin that a table's `use` names, if that can be told."""
    if not issubclass(table, PluginTable):
        return None
    default = schema.model_fields[str(path[0])].default
    use = default.use if isinstance(default, PluginTable) else table.model_fields["use"].default
    if loaded is not None:
        for candidate in (path, (*path, 0)):
            found, value = _value_at(loaded.config.model_dump(mode="json"), (*candidate, "use"))
            use = value if found else use
    if not isinstance(use, str):
        return None
    try:
        return registry.describe(table.kind, use).config
    except PluginError:
        return None


def _installed(kind: str) -> list[str]:
    listed = registry.listing(kind)
    width = max((len(item.entry.name) for item in listed), default=0)
    summaries = [item.contribution.summary if item.contribution else item.problem for item in listed]
    return [
        "  installed" if listed else "  installed none",
        *(
            f"    {item.entry.name:{width}}  {summary}".rstrip()
            for item, summary in zip(listed, summaries, strict=True)
        ),
    ]


def _value_at(data: Any, path: Path) -> tuple[bool, Any]:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, data


def _unknown(path: Path, known: list[str], schema: type[BaseModel]) -> ConfigError:
    return ConfigError([f"{dotted(path)}: {unknown_key(str(path[-1]), known, schema, path[:-1])}"])
