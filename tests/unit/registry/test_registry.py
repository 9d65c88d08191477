"""The three grains of the registry, with real package metadata on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prl import registry
from prl.contribution import API_VERSION, Contribution, PluginConfig
from prl.errors import (
    ConfigError,
    PluginApiMismatch,
    PluginBroken,
    PluginConflict,
    PluginError,
    PluginMissing,
)

PLUGIN = """
from prl.contribution import Contribution, PluginConfig

class Config(PluginConfig):
    length: int = 5
    names: tuple[str, ...] = ()

ENV = Contribution(config=Config, factory="{package}.env:build", summary="Says hello.")
OLD = Contribution(factory="{package}.env:build", api_version=0)
NOT_ONE = 7
LOST = Contribution(factory="{package}.missing:build")
"""
ENV = """
def build(config):
    return ("built", config)
"""


class Site:
    """A folder on sys.path into which packages are "installed"."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, distribution: str, points: dict[str, str], plugin: str = PLUGIN, group: str = "prl.envs") -> str:
        package = distribution.replace("-", "_")
        folder = self.path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "plugin.py").write_text(plugin.replace("{package}", package))
        (folder / "env.py").write_text(ENV)
        info = self.path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        lines = [f"{name} = {package}.plugin:{value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        registry.refresh()
        return package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]
    registry.refresh()


def test_names_come_from_metadata_without_importing(site: Site) -> None:
    package = site.install("acme-hello", {"acme_hello": "ENV"}, plugin="raise SystemExit('imported')")
    entry = registry.names("envs")["acme_hello"]
    assert (entry.distribution, entry.version, entry.value) == ("acme-hello", "1.2", f"{package}.plugin:ENV")
    assert f"{package}.plugin" not in sys.modules


def test_describe_does_not_import_the_factory_and_build_does(site: Site) -> None:
    package = site.install("acme-hello", {"acme_hello": "ENV"})
    contribution = registry.describe("envs", "acme_hello")
    assert contribution.summary == "Says hello."
    assert f"{package}.env" not in sys.modules
    built, config = registry.build("envs", "acme_hello", {"length": 3, "names": ["a"]})
    assert built == "built"
    assert (config.length, config.names) == (3, ("a",))


@pytest.mark.parametrize("value", ["3", True, 3.5, [3]])
def test_a_wrong_type_is_not_coerced(site: Site, value: object) -> None:
    site.install("acme-hello", {"acme_hello": "ENV"})
    with pytest.raises(ConfigError, match="length"):
        registry.build("envs", "acme_hello", {"length": value})


def test_every_problem_of_a_table_is_reported(site: Site) -> None:
    site.install("acme-hello", {"acme_hello": "ENV"})
    with pytest.raises(ConfigError) as caught:
        registry.build("envs", "acme_hello", {"length": "x", "lenght": 3})
    assert len(caught.value.problems) == 2


def test_a_missing_name_says_what_is_near_what_is_installed_and_how_to_get_it(site: Site) -> None:
    site.install("acme-hello", {"acme_hello": "ENV"})
    with pytest.raises(PluginMissing) as caught:
        registry.describe("envs", "acme_helo")
    message = str(caught.value)
    assert "no environment is called 'acme_helo'. Did you mean 'acme_hello'?" in message
    assert "Installed: " in message and "`prl plugins install PACKAGE`" in message
    with pytest.raises(PluginMissing, match="no loss is called 'nope'"):
        registry.describe("losses", "nope")


def test_two_distributions_with_one_name_are_an_error_that_names_both(site: Site) -> None:
    site.install("acme-hello", {"hello": "ENV"})
    site.install("other-hello", {"hello": "ENV"})
    assert set(registry.names("envs")["hello"].others) < {"acme-hello", "other-hello"}
    with pytest.raises(PluginConflict, match="acme-hello, other-hello"):
        registry.describe("envs", "hello")


def test_a_broken_plugin_is_listed_with_its_reason_and_harms_no_other(site: Site) -> None:
    site.install("acme-broken", {"broken": "ENV"}, plugin="import no_such_library")
    site.install("acme-hello", {"acme_hello": "ENV", "number": "NOT_ONE", "absent": "GONE"})
    listed = {item.entry.name: item for item in registry.listing("envs")}
    assert listed["acme_hello"].contribution is not None and not listed["acme_hello"].problem
    assert listed["broken"].contribution is None and "no_such_library" in listed["broken"].problem
    assert "is a int, where a Contribution is expected" in listed["number"].problem
    with pytest.raises(PluginBroken, match="acme-broken 1.2 cannot be imported"):
        registry.describe("envs", "broken")
    with pytest.raises(PluginBroken, match="GONE"):
        registry.describe("envs", "absent")
    registry.describe("envs", "acme_hello")


def test_another_interface_version_is_an_error_only_where_it_is_used(site: Site) -> None:
    site.install("acme-old", {"old": "OLD"})
    assert "old" in registry.names("envs")
    with pytest.raises(PluginApiMismatch, match=rf"version 0 .* version {API_VERSION}.*newer release of acme-old"):
        registry.describe("envs", "old")


def test_a_factory_that_cannot_be_imported_is_named(site: Site) -> None:
    site.install("acme-lost", {"lost": "LOST"})
    registry.describe("envs", "lost")
    with pytest.raises(PluginBroken, match="implementation of the environment 'lost'.*acme_lost.missing"):
        registry.build("envs", "lost")


def test_override_is_seen_and_undone() -> None:
    class Config(PluginConfig):
        pass

    mine = Contribution(config=Config, factory="builtins:id")
    with registry.override("losses", "mine", mine):
        assert registry.describe("losses", "mine") is mine
        assert registry.names("losses")["mine"].distribution == "override"
        with registry.override("losses", "mine", Contribution(factory="builtins:len")):
            assert registry.describe("losses", "mine") is not mine
        assert registry.describe("losses", "mine") is mine
    assert "mine" not in registry.names("losses")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(PluginError, match="'env'; the kinds are"):
        registry.names("env")
