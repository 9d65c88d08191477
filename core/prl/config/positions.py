"""Where every key and value of a TOML text stands.

`tomllib` parses but keeps no positions, so this scanner walks a text that `tomllib` has accepted and only has to find
where things are, inline tables and arrays included.
"""

from __future__ import annotations

import bisect
import re
import tomllib
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""A key from the root: ("envs", 0, "weight")."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
_SPACE = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:[^"\\\n]|\\.)*"|' r"'[^'\n]*'", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Line and column, both from 1, of a key and of its value (for a table's header, of its name)."""

    key: tuple[int, int]
    value: tuple[int, int]


def scan(text: str) -> dict[Path, Place]:
    """The place of every key, table and array element of a text that is valid TOML."""
    return _Scanner(text.replace("\r\n", "\n")).document()


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.places: dict[Path, Place] = {}
        self.lengths: dict[Path, int] = {}
        """Elements so far of each array of tables."""

    def document(self) -> dict[Path, Place]:
        table: Path = ()
        self.skip(_SPACE)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self.header()
            else:
                self.pair(table)
            self.skip(_SPACE)
        return self.places

    def header(self) -> Path:
        """`[a.b]` or `[[a.b]]`. A name that is an array of tables stands for its last element."""
        array = self.text.startswith("[[", self.at)
        self.at += 2 if array else 1
        path: Path = ()
        parts = self.keys()
        for index, (name, start) in enumerate(parts):
            path = (*path, name)
            self.note(path, start, start)
            if array and index == len(parts) - 1:
                self.lengths[path] = self.lengths.get(path, 0) + 1
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
                self.note(path, start, start)
        self.skip(_BLANK)
        self.at += 2 if array else 1
        return path

    def pair(self, table: Path) -> None:
        """`a.b = value` inside a table."""
        path = table
        parts = self.keys()
        self.skip(_BLANK)
        self.at += 1  # the equals sign
        self.skip(_BLANK)
        for name, start in parts:
            path = (*path, name)
            self.note(path, start, self.at)
        self.value(path)

    def keys(self) -> list[tuple[str, int]]:
        """A dotted key as (name, offset) pairs."""
        found: list[tuple[str, int]] = []
        while True:
            self.skip(_BLANK)
            start = self.at
            if self.text[start] in "\"'":
                raw = self.take(_STRING)
                name = tomllib.loads(f"key = {raw}")["key"]
            else:
                name = self.take(_BARE)
            found.append((name, start))
            self.skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return found
            self.at += 1

    def value(self, path: Path) -> None:
        opening = self.text[self.at]
        if opening == "[":
            self.array(path)
        elif opening == "{":
            self.inline_table(path)
        elif opening in "\"'":
            self.take(_STRING)
        else:
            self.take(_SCALAR)

    def array(self, path: Path) -> None:
        self.at += 1
        self.skip(_SPACE)
        index = 0
        while self.text[self.at] != "]":
            self.note((*path, index), self.at, self.at)
            self.value((*path, index))
            index += 1
            self.comma()
        self.at += 1

    def inline_table(self, path: Path) -> None:
        self.at += 1
        self.skip(_SPACE)
        while self.text[self.at] != "}":
            self.pair(path)
            self.comma()
        self.at += 1

    def comma(self) -> None:
        self.skip(_SPACE)
        if self.text.startswith(",", self.at):
            self.at += 1
            self.skip(_SPACE)

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        assert match is not None, f"not valid TOML at offset {self.at}"
        self.at = match.end()
        return match[0]

    def note(self, path: Path, key: int, value: int) -> None:
        self.places.setdefault(path, Place(self.position(key), self.position(value)))

    def position(self, offset: int) -> tuple[int, int]:
        line = bisect.bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1
