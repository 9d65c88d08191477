"""Plugins that are a name in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prl import files, registry
from prl.errors import ConfigError, PluginBroken, PluginMissing

MODULE = '''
from __future__ import annotations
from typing import TYPE_CHECKING
import neighbour
from prl.contribution import Contribution, PluginConfig
if TYPE_CHECKING:
    from nowhere import Mystery

class Plain:
    """The plainest environment."""

class Keywords:
    def __init__(self, length: int = 5, *, words: list[str] = ()) -> None:
        self.length, self.words = length, words

class Inner:
    class Config(PluginConfig):
        depth: int = 1
    def __init__(self, config: Inner.Config) -> None:
        self.depth = config.depth

def with_dict(config=None):
    return config

def anything(**settings):
    return settings

def needs(length: int):
    return length

def unresolved(thing: Mystery = None):
    return thing

READY = Contribution(config=Inner.Config, factory="builtins:repr")
NUMBER = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_env.py").write_text(MODULE)
    (tmp_path / "neighbour.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def build(name: str, table: dict[str, Any] | None = None) -> Any:
    return registry.build("envs", f"./my_env.py:{name}", table or {})


def test_a_class_is_its_own_factory_and_its_parameters_are_its_keys(folder: Path) -> None:
    assert build("Keywords").length == 5
    assert build("Keywords", {"length": 7, "words": ["a"]}).words == ["a"]
    with pytest.raises(ConfigError) as caught:
        build("Keywords", {"length": "7", "lenght": 7})
    assert len(caught.value.problems) == 2
    assert registry.describe("envs", "./my_env.py:Plain").summary == "The plainest environment."


def test_the_other_shapes_of_a_factory(folder: Path) -> None:
    assert build("Inner", {"depth": 4}).depth == 4
    assert build("with_dict", {"a": 1}) == {"a": 1}
    assert build("anything", {"a": [1], "b": "x"}) == {"a": [1], "b": "x"}
    assert build("unresolved", {"thing": 3}) == 3
    assert "depth=2" in build("READY", {"depth": 2})
    with pytest.raises(ConfigError, match="length"):
        build("needs")


def test_a_file_is_found_relative_to_the_base(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absolute = files.absolute("./my_env.py:Plain")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(PluginMissing, match="there is no file"):
        registry.describe("envs", "./my_env.py:Plain")
    first = registry.build("envs", absolute)
    second = registry.build("envs", "./my_env.py:Plain", base=folder)
    assert type(first) is type(second), "one file is imported once"


def test_what_is_missing_or_broken_is_said(folder: Path) -> None:
    with pytest.raises(PluginMissing, match="defines no Nope; it defines .*Keywords") as missing:
        build("Nope")
    assert "PluginConfig" not in str(missing.value), "what the file imports is nothing that it defines"
    with pytest.raises(PluginBroken, match="NUMBER is a int"):
        build("NUMBER")
    (folder / "bad.py").write_text("import no_such_library")
    for _ in range(2):
        with pytest.raises(PluginBroken, match="no_such_library"):
            registry.describe("envs", "./bad.py:Env")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("./a.py:B", True), ("/x/a.py:B", True), ("a.py:B", True), ("hub:owner/env", False), ("a", False)],
)
def test_references_are_told_from_names(name: str, expected: bool) -> None:
    assert files.is_reference(name) is expected
