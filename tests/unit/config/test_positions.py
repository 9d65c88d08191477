"""Positions of keys and values in TOML texts."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from prl.config.positions import Path, scan

TEXT = '''\
name = "a # b"  # comment
"quo.ted" = 1
[a]
b.c = """one
d = 3
"""
list = [ 1,  # one
  {q = 2, 'r s' = [[], {}]},
]
[[envs]]
use = 'a'
[envs.inner]
k = -1.5e3
[[envs]]
use = "b\\"]"
[[envs.deep]]
when = 1979-05-27 07:32:00
[ spaced . "out" ]
x = true
'''


def paths(value: Any, prefix: Path = ()) -> set[Path]:
    found = {prefix} if prefix else set()
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found.union(*(paths(item, (*prefix, key)) for key, item in items))


def test_every_key_and_element_has_a_place() -> None:
    assert set(scan(TEXT)) == paths(tomllib.loads(TEXT))


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("name",), (1, 1), (1, 8)),
        (("quo.ted",), (2, 1), (2, 13)),
        (("a", "b", "c"), (4, 3), (4, 7)),
        (("a", "list", 1, "q"), (8, 4), (8, 8)),
        (("a", "list", 1, "r s"), (8, 11), (8, 19)),
        (("envs", 0, "inner", "k"), (13, 1), (13, 5)),
        (("envs", 1, "use"), (15, 1), (15, 7)),
        (("envs", 1, "deep", 0, "when"), (17, 1), (17, 8)),
        (("spaced", "out"), (18, 12), (18, 12)),
    ],
)
def test_places_are_lines_and_columns_from_one(path: Path, key: tuple[int, int], value: tuple[int, int]) -> None:
    place = scan(TEXT)[path]
    assert (place.key, place.value) == (key, value)


def test_windows_line_ends_change_nothing() -> None:
    assert scan(TEXT.replace("\n", "\r\n")) == scan(TEXT)
