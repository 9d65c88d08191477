"""Documents and shipped configurations speak of what exists."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prl import hookspecs
from prl.config.bench import BenchConfig
from prl.config.load import load_config
from prl.config.schema import RunConfig, SftConfig
from prl.contribution import KINDS

HOOKS = sorted(name for name in vars(hookspecs) if name.startswith("prl_"))


def configurations(root: Path) -> list[Path]:
    """Every TOML that a reader is meant to start a run with."""
    found = [*root.glob("examples/**/*.toml"), *root.glob("cli/prl_cli/templates/*.toml")]
    return sorted(
        path
        for path in found
        if path.name != "pyproject.toml" and not {"runs", ".venv"} & set(path.relative_to(root).parts)
    )


def test_shipped_configurations_are_valid(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `examples/plugins` need a plugin that is not installed here; their own test uses them."""
    monkeypatch.chdir(root)
    found = [path for path in configurations(root) if "plugins" not in path.relative_to(root).parts]
    assert found
    for path in found:
        data = tomllib.loads(path.read_text())
        schema = BenchConfig if "bench" in data else SftConfig if "data" in data else RunConfig
        load_config([path], schema=schema, checks=False)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_signature_and_tested(hook: str, root: Path) -> None:
    signature = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert f"### `{hook}({signature})`" in (root / "docs" / "hooks.md").read_text()
    tests = [path.read_text() for path in (root / "tests").rglob("test_*.py") if path.name != Path(__file__).name]
    assert any(hook in text for text in tests), f"no test uses {hook}"


def test_the_reference_of_the_configuration_is_current(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import reference as r; print(r.updated(r.PAGE.read_text()) == r.PAGE.read_text())"],
        cwd=root / "docs",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "True", f"run `python docs/reference.py` {done.stderr}"


def test_links_between_documents_resolve(root: Path) -> None:
    broken = []
    for page in [
        *root.glob("*.md"),
        *root.glob("docs/**/*.md"),
        *root.glob("examples/**/*.md"),
        *root.glob("*/README.md"),
        *root.glob("plugins/**/README.md"),
    ]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(root)}: {target}")
    assert not broken, "\n".join(broken)


def test_every_room_has_a_readme(root: Path) -> None:
    rooms = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    rooms = [path for path in rooms if any(path.rglob("*.py")) and path.name not in ("build", "dist", "runs")]
    assert len(rooms) > 6
    assert [path.name for path in rooms if not (path / "README.md").is_file()] == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "commands"])  # docs/cli.md has those
def test_every_kind_of_plugin_has_a_page(kind: str, root: Path) -> None:
    page = root / "docs" / "plugins" / f"{ {'losses': 'loss'}.get(kind, kind.removesuffix('s')) }.md"
    assert f"prl.{kind}" in page.read_text()
    assert f"(plugins/{page.name})" in (root / "docs" / "README.md").read_text()


def test_make_runs_files_that_exist(root: Path) -> None:
    named = re.findall(r"\$\(BIN\)/python (\S+\.py)", (root / "Makefile").read_text())
    assert named and not [file for file in named if not (root / file).exists()]


def test_configurations_shown_in_documents_are_valid(root: Path) -> None:
    """A TOML block that sets a whole run, recognised by its [model], must be one."""
    for page in [*root.glob("docs/**/*.md"), root / "README.md"]:
        if not page.exists():
            continue
        for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
            data = tomllib.loads(block)
            if "model" in data and "envs" in data and all("./" not in env["use"] for env in data["envs"]):
                RunConfig.model_validate(data)
