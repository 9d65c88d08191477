"""What the guards look at: the distributions of the workspace as they are on disk."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Distribution:
    """One pyproject.toml of the workspace.

    Args:
        folder: relative to the root, "plugins/losses".
        package: its import name.
    """

    folder: str
    project: dict[str, Any]
    package: str

    @property
    def name(self) -> str:
        return str(self.project["name"])

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        return dict(self.project.get("entry-points", {}))

    def sources(self) -> Iterator[Path]:
        return (path for path in sorted((self.path / self.package).rglob("*.py")) if "templates" not in path.parts)


def read_distributions() -> list[Distribution]:
    found = []
    for file in sorted(
        [*ROOT.glob("core/pyproject.toml"), *ROOT.glob("cli/pyproject.toml"), *ROOT.glob("plugins/**/pyproject.toml")]
    ):
        data = tomllib.loads(file.read_text())
        (package,) = data["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        found.append(Distribution(str(file.parent.relative_to(ROOT)), data["project"], package))
    return found


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def workspace() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def distributions() -> list[Distribution]:
    return read_distributions()
