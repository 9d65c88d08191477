"""Whatever TOML text: every key has a place, and the text at the place of a key is that key."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prl.config.compose import Composition
from prl.config.positions import Path, scan

KEYS = st.text(alphabet="abz-_09", min_size=1, max_size=4) | st.text(alphabet="a .=[]{}#'\\", min_size=1, max_size=5)
SCALARS = st.integers(-(2**40), 2**40) | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(
    KEYS, VALUES | st.lists(st.dictionaries(KEYS, VALUES, max_size=2), min_size=1, max_size=2), max_size=4
)
LAYOUT = st.sampled_from(["", " ", "\t"])


def quoted(text: str) -> str:
    escaped = "".join(ch if 32 <= ord(ch) < 127 and ch not in '"\\' else f"\\U{ord(ch):08x}" for ch in text)
    return f'"{escaped}"'


def written(value: Any, space: str) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{space}" + f"{space},{space}".join(written(item, space) for item in value) + f"{space}]"
    if isinstance(value, dict):
        pairs = (f"{quoted(key)}{space}={space}{written(item, space)}" for key, item in value.items())
        return "{" + space + ", ".join(pairs) + space + "}"
    return repr(value)


def document(data: dict[str, Any], space: str) -> str:
    """Scalars first, then `[table]` and `[[array of tables]]`."""
    lines, tables = [f"# a comment = [{space}"], []
    for key, value in data.items():
        name = quoted(key)
        if isinstance(value, dict):
            tables.append(f"[{space}{name}{space}]{space}# [x]\n" + pairs(value, space))
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables += [f"[[{space}{name}{space}]]\n" + pairs(item, space) for item in value]
        else:
            lines.append(f"{space}{name}{space}={space}{written(value, space)} # {name}")
    return "\n".join([*lines, *tables, ""])


def pairs(table: dict[str, Any], space: str) -> str:
    return "\n".join(f"{quoted(key)}{space}={space}{written(value, space)}" for key, value in table.items()) + "\n"


def paths(value: Any, prefix: Path = ()) -> set[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ({prefix} if prefix else set()).union(*(paths(item, (*prefix, key)) for key, item in items))


QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(TABLES, LAYOUT)
def test_every_key_has_the_place_where_it_stands(data: dict[str, Any], space: str) -> None:
    text = document(data, space)
    assert tomllib.loads(text) == data
    places = scan(text)
    assert set(places) == paths(data)
    lines = text.split("\n")
    for path, place in places.items():
        line, column = place.key
        if isinstance(path[-1], str):
            assert lines[line - 1][column - 1 :].startswith(quoted(path[-1]))


@QUICK
@given(KEYS, SCALARS | st.lists(SCALARS, max_size=3))
def test_a_set_gives_the_value_it_was_given(key: str, value: Any) -> None:
    composition = Composition([], [f"{quoted(key)}={written(value, ' ')}"])
    if not composition.unreadable:
        (found,) = composition.data.values()
        assert found == value


@QUICK
@given(st.text(max_size=30))
def test_no_set_is_too_strange_to_be_answered(expression: str) -> None:
    composition = Composition([], [expression])
    assert composition.data or composition.unreadable
