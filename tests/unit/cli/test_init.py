"""What `prl init` writes is what a person would start with: it is valid as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prl.config.load import load_config


@pytest.mark.parametrize("kind", ["laptop", "gpu", "node"])
def test_what_is_written_passes_the_check(project: Path, prl: Any, kind: str) -> None:
    assert prl("init", "--kind", kind, "my first").exit_code == 0
    path = project / "my first" / "prl.toml"
    assert prl("config", "check", path).exit_code == 0, prl("config", "check", path).stderr
    assert load_config([path]).config.name == "my-first"
    told = [line for line in path.read_text().splitlines() if "#" in line]
    assert len(told) > 15  # it is commented


def test_nothing_is_overwritten_unless_asked(project: Path, prl: Any) -> None:
    (project / "prl.toml").write_text("precious")
    result = prl("init")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert (project / "prl.toml").read_text() == "precious"
    assert not (project / "make_model.py").exists()
    assert prl("init", "--force").exit_code == 0
    assert (project / "prl.toml").read_text() != "precious"


def test_json_names_the_files(project: Path, prl: Any) -> None:
    answer = json.loads(prl("init", "--json", "--kind", "gpu", "x").stdout)
    assert (answer["kind"], answer["files"]) == ("gpu", ["x/prl.toml"])
