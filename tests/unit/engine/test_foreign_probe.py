"""What `prl.foreign.probe` says of an interpreter is what a role under it will find."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from prl import foreign
from prl.errors import EnvironmentNotFit


def test_a_library_on_the_import_path_of_roles_is_found_and_a_file_that_lies_about_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    for folder, name in ((site, "some_engine"), (here, "some_file")):
        folder.mkdir()
        (folder / f"{name}.py").write_text("")
    metadata = site / "some_engine-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-engine\nVersion: 1.2\n")
    former = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{former}" if former else str(site))
    monkeypatch.chdir(here)
    found = foreign.probe(sys.executable, ["some-engine", "other"], ["some_engine", "some_file"])
    assert found.python == sys.version_info[:2]
    assert found.versions == {"some-engine": "1.2", "other": None} and found.missing == ["some_file"]


def test_what_is_no_interpreter_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotFit, match="cannot be run"):
        foreign.probe(tmp_path / "python", [])
