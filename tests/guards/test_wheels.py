"""Every distribution builds as a wheel that installs alone into an empty environment.

"Alone" is with prl-core and what that needs: the environment of a machine where configurations are checked, without
torch. Everything a distribution declares must be importable and describable there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Distribution

pytestmark = pytest.mark.slow

DESCRIBE = """
import json, sys
from prl import registry
from prl.contribution import KINDS
found = {kind: {name: registry.describe(kind, name).summary for name in registry.names(kind)} for kind in KINDS}
print(json.dumps({"plugins": found, "torch": "torch" in sys.modules}))
"""


def run(*command: str) -> str:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=variables)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def pip(python: str, *arguments: str) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet", *arguments)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, distributions: list[Distribution]) -> dict[str, Path]:
    """Built all at once: pip starts up once."""
    out = tmp_path_factory.mktemp("wheels")
    folders = [str(dist.path) for dist in distributions]
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), *folders)
    found = {path.name.partition("-")[0].replace("_", "-"): path for path in out.glob("*.whl")}
    assert set(found) == {dist.name for dist in distributions}
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> str:
    """Python of an environment with prl-core and its dependencies, from the package index."""
    path = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", str(path))
    python = str(path / "bin" / "python")
    pip(python, "install", str(wheels["prl-core"]))
    return python


def test_wheels_hold_the_package_and_nothing_else(wheels: dict[str, Path], distributions: list[Distribution]) -> None:
    for dist in distributions:
        with zipfile.ZipFile(wheels[dist.name]) as archive:
            names = archive.namelist()
        tops = {name.partition("/")[0] for name in names}
        info = f"{dist.name.replace('-', '_')}-{dist.project['version']}.dist-info"
        assert tops == {dist.package, info}
        sources = {str(path.relative_to(dist.path)) for path in (dist.path / dist.package).rglob("*") if path.is_file()}
        packed = {name for name in names if not name.startswith(info)}
        assert packed == {name for name in sources if "__pycache__" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in names) or not (dist.path / "LICENSE").exists()


def test_the_core_alone_lists_and_describes(bare: str) -> None:
    assert not any(json.loads(run(bare, "-c", DESCRIBE))["plugins"].values())


def test_each_distribution_declares_itself_without_torch(
    bare: str, wheels: dict[str, Path], distributions: list[Distribution]
) -> None:
    for dist in distributions:
        if dist.name == "prl-core":
            continue
        pip(bare, "install", "--no-deps", "--no-index", str(wheels[dist.name]))
        try:
            found = json.loads(run(bare, "-c", DESCRIBE))
            expected = {
                (group.removeprefix("prl."), name)
                for group, points in dist.entry_points.items()
                for name in points
                if group != "prl.hooks"
            }
            described = {(kind, name) for kind, named in found["plugins"].items() for name in named}
            assert described == expected, dist.name
            assert all(summary for named in found["plugins"].values() for summary in named.values()), dist.name
            assert not found["torch"]
            run(bare, "-c", f"import {dist.package}")
        finally:
            pip(bare, "uninstall", "--yes", dist.name)


def test_everything_it_depends_on_can_be_resolved(wheels: dict[str, Path], tmp_path: Path) -> None:
    """pip plans the installation of all distributions into an empty environment; nothing is installed."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty"))
    report = tmp_path / "report.json"
    python = str(tmp_path / "empty" / "bin" / "python")
    pip(python, "install", "--dry-run", "--report", str(report), *map(str, wheels.values()))
    planned = {item["metadata"]["name"].lower().replace("_", "-") for item in json.loads(report.read_text())["install"]}
    assert set(wheels) <= planned
    assert not planned & {"prl", "prl-cli"}, "those belong to others"
