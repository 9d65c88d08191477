"""A role under another interpreter: it sees our packages and nothing else of this installation."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from prl import foreign
from prl.errors import EnvironmentNotFit

SEEN = """
import importlib.metadata as m, importlib.util as u, json, sys
import prl
print(json.dumps([
    prl.__file__, sorted(d.name for d in m.distributions() if d.name.startswith("prl")), sys.argv[1:],
    [p.name for p in m.entry_points(group="prl.channels")], u.find_spec("prl_models") is None,
]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("other")
    venv.create(folder, with_pip=False)
    return str(folder / "bin/python")


def test_exactly_the_named_distributions_come_along(python: str, tmp_path: Path) -> None:
    links = tmp_path / "links"
    argv = foreign.command(python, ["prl-core", "prl-channels"], str(links), "-c", SEEN, "argument")
    for _ in range(2):  # the second finds the links
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    where, distributions, arguments, channels, no_models = json.loads(done.stdout)
    assert Path(where).is_relative_to(links)
    assert distributions == ["prl-channels", "prl-core"] and "filesystem" in channels
    assert arguments == ["argument"] and no_models


def test_under_this_interpreter_nothing_is_linked() -> None:
    assert foreign.command(sys.executable, ["prl-core"], "links", "-m", "x") == (sys.executable, "-m", "x")


def test_an_interpreter_is_asked_what_it_has(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = foreign.probe(python, ["prl-core", "pip"], ["json", "numpy"])
    assert found.python == sys.version_info[:2] and found.versions["pip"] is None and found.missing == ["numpy"]
    with pytest.raises(EnvironmentNotFit, match="cannot be run"):
        foreign.probe("/nowhere/python", [])


def test_a_distribution_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotFit, match="prl-nothing"):
        foreign.link(tmp_path / "links", ["prl-nothing"])
