"""From pydantic's errors to problems that say which key, what is wrong with it, and what was probably meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from prl.config.compose import Problem, dotted
from prl.config.positions import Path
from prl.config.schema import PluginTable, RunConfig, SftConfig

_PLAIN = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a text in quotes",
    "bool_type": "must be true or false",
    "list_type": "must be an array, [ ... ]",
    "tuple_type": "must be an array, [ ... ]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dataclass_type": "must be a table",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "finite_number": "must be a finite number",
    "string_too_short": "must have {min_length} or more characters",
    "too_short": "needs at least {min_length}",
}
_WITH = {"run": "", "sft": "; prl config reads those with --sft"}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument")


def translate(
    error: ValidationError,
    schema: type[BaseModel],
    prefix: Path = (),
    *,
    also: tuple[str, ...] = (),
    root: type[BaseModel] | None = None,
) -> Iterator[Problem]:
    """The problems of one failed validation.

    Args:
        schema: what was validated against, standing at `prefix` in the configuration.
        also: further keys that are valid there, to be proposed for a misspelt one.
        root: schema of the whole configuration, to find the table that an unknown key belongs to.
    """
    for item in error.errors():
        context: Mapping[str, Any] = item.get("ctx", {})
        path: Path = (*prefix, *item["loc"])
        if item["type"] in _UNKNOWN:
            known = fields(schema, item["loc"][:-1]) + (list(also) if len(item["loc"]) == 1 else [])
            yield Problem(path, unknown_key(str(path[-1]), known, root or schema, path[:-1]), at="key")
        elif item["type"] in _MISSING:
            yield Problem(path, f"is required{_described(schema, item['loc'])}", at="key")
        elif item["type"] == "prl":
            yield Problem((*path, *Problem(context["key"], "").path), context["message"])
        else:
            yield Problem(path, _message(item["type"], item["msg"], context) + _given(item["type"], item["input"]))


def unknown_key(key: str, known: list[str], root: type[BaseModel], table: Path = ()) -> str:
    """ "unknown key 'max_step'; did you mean 'max_steps'?", or what the table takes."""
    near = difflib.get_close_matches(key, known, 1)
    if near:
        return f"unknown key {key!r}; did you mean {near[0]!r}?"
    elsewhere = [dotted(path) for path in everywhere(root) if path[-1] == key and path[:-1] != table]
    if elsewhere:
        return f"unknown key {key!r} here; did you mean {elsewhere[0]}?"
    for command, other in (("run", RunConfig), ("sft", SftConfig)):
        if not table and root is not other and key in other.model_fields and issubclass(root, RunConfig | SftConfig):
            return f"unknown key {key!r} here: it belongs to configurations of prl {command}{_WITH[command]}"
    takes = ", ".join(known) if known else "no keys"
    return f"unknown key {key!r}; {dotted(table) or 'the top level'} takes {takes}"


def fields(schema: type[BaseModel], path: Path) -> list[str]:
    """The keys of the table at `path`."""
    found = table_at(schema, path)
    if found is not None:
        return list(found.model_fields)
    annotation = _annotation(schema, path)
    return list(getattr(annotation, "__dataclass_fields__", {}))


def table_at(schema: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The schema of the table at `path`, or None where there is no table."""
    annotation = _annotation(schema, path) if path else schema
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def everywhere(schema: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """Every key below a schema, those of arrays without an index."""
    for key in schema.model_fields:
        yield (*prefix, key)
        below = table_at(schema, (key,))
        if below is not None:
            yield from everywhere(below, (*prefix, key))


def plugin_tables(schema: type[BaseModel]) -> Iterator[tuple[str, type[PluginTable], bool]]:
    """The top-level keys that hold a plugin's table, and whether they hold an array of them."""
    for key, field in schema.model_fields.items():
        inner = _element(field.annotation)
        if isinstance(inner, type) and issubclass(inner, PluginTable):
            yield key, inner, inner is not field.annotation


def _annotation(schema: Any, path: Path) -> Any:
    here: Any = schema
    for part in path:
        if isinstance(part, int):
            continue
        if not (isinstance(here, type) and issubclass(here, BaseModel)) or part not in here.model_fields:
            return None
        here = _element(here.model_fields[part].annotation)
    return here


def _element(annotation: Any) -> Any:
    """X of list[X] and of X | None; of several, such as "auto" or a table, the table."""
    arguments = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    origin = typing.get_origin(annotation)
    if origin is typing.Literal or not arguments or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return annotation
    tables = [argument for argument in arguments if isinstance(argument, type) and issubclass(argument, BaseModel)]
    return _element((tables or arguments)[0])


def _message(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind].format_map(context)
    return message.removeprefix("Value error, ")


def _given(kind: str, value: Any) -> str:
    """The offending value, where it is short and the message does not speak of a whole table."""
    if kind in ("value_error", "assertion_error") or isinstance(value, dict):
        return ""
    text = repr(value)
    return f", not {text}" if len(text) <= 60 else ""


def _described(schema: type[BaseModel], path: Path) -> str:
    parent = table_at(schema, path[:-1])
    name = path[-1] if path else ""
    field = parent.model_fields.get(str(name)) if parent is not None else None
    return f": {first_line(field.description)}" if field is not None and field.description else ""


def first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
