"""`examples/plugins`: packages of a third party, built as wheels, installed, listed, used by name, gone afterwards.

They are installed into an environment of their own that sees the packages of this one, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "env": ("acme-prl-arithmetic", "envs", "arithmetic", "max_number", "[[envs]]\nuse = 'arithmetic'\nmax_numbr = 3\n"),
    "loss": (
        "acme-prl-reinforce",
        "losses",
        "reinforce_tis",
        "max_weight",
        "[loss]\nuse = 'reinforce_tis'\nmax_wieght = 3\n",
    ),
}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and what is run in it."""

    path: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [self.python, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=120
        )

    def prl(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "prl_cli", *arguments, cwd=cwd)

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    def plugins(self) -> dict[tuple[str, str], dict[str, Any]]:
        done = self.prl("plugins", "--json")
        assert done.returncode == 0, done.stderr
        return {(row["kind"], row["name"]): row for row in json.loads(done.stdout)["plugins"]}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    path = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return Environment(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def build(folder: str) -> Path:
        """Build in a copy: a build leaves nothing in the sources."""
        out = tmp_path_factory.mktemp(f"wheel-{folder}")
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [*command, "--wheel-dir", str(out), str(ROOT / "examples" / "plugins" / folder)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        (found,) = out.glob("*.whl")
        return found

    return build


@pytest.mark.parametrize("folder", EXAMPLES)
def test_a_third_party_plugin_comes_is_used_by_name_and_goes(
    folder: str, environment: Environment, wheel: Callable[[str], Path], tmp_path: Path
) -> None:
    distribution, kind, name, key, misspelt = EXAMPLES[folder]
    config = str(ROOT / "examples" / "plugins" / folder / "run.toml")
    before = environment.plugins()
    assert (kind, name) not in before
    refused = environment.prl("config", "check", config, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"is called {name!r}" in refused.stderr and "install" in refused.stderr

    installed = environment.prl("plugins", "install", "--json", str(wheel(folder)), cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    assert json.loads(installed.stdout)["installed"] == [{"kind": kind, "name": name, "package": distribution}]
    try:
        row = environment.plugins()[kind, name]
        assert (row["package"], row["version"]) == (distribution, "1.0.0")
        checked = environment.prl("config", "check", config, cwd=tmp_path)
        assert checked.returncode == 0, checked.stderr
        (tmp_path / "wrong.toml").write_text(misspelt)
        wrong = environment.prl("config", "check", config, "wrong.toml", cwd=tmp_path)
        assert wrong.returncode == 2
        assert f"wrong.toml:3:1: error: {kind if folder == 'env' else folder}" in wrong.stderr
        assert f"did you mean {key!r}?" in wrong.stderr, "its own keys are known"
    finally:
        removed = environment.prl("plugins", "uninstall", distribution, cwd=tmp_path)
    assert removed.stdout == f"removed {kind}/{name} ({distribution})\n", removed.stderr
    assert environment.plugins() == before
    assert environment.prl("config", "check", config, cwd=tmp_path).returncode == 2


def test_a_name_in_a_file_needs_no_package(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(
        "from prl.env import SingleTurnEnv\nclass MyEnv(SingleTurnEnv):\n    def __init__(self, length: int = 3): ...\n"
    )
    (tmp_path / "run.toml").write_text('[model]\npath = "org/model"\n[[envs]]\nuse = "./my_env.py:MyEnv"\nlength = 5\n')
    assert environment.prl("config", "check", "run.toml", cwd=tmp_path).returncode == 0
    wrong = environment.prl("config", "check", "run.toml", "--set", "envs.0.lenght=1", cwd=tmp_path)
    assert wrong.returncode == 2 and "did you mean 'length'?" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("folder", EXAMPLES)
def test_its_own_tests_pass_where_it_is_installed(
    folder: str, environment: Environment, wheel: Callable[[str], Path], tmp_path: Path
) -> None:
    distribution, kind, name, _, _ = EXAMPLES[folder]
    environment.pip("install", "--no-deps", "--no-index", str(wheel(folder)))
    try:
        tests = str(ROOT / "examples" / "plugins" / folder / "tests")
        done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tests, tests, cwd=tmp_path)
        assert done.returncode == 0, done.stdout
        contract = environment.prl("plugins", "check", f"{kind}/{name}", cwd=tmp_path)
        assert contract.returncode == 0, contract.stdout + contract.stderr
    finally:
        environment.pip("uninstall", "--yes", distribution)
