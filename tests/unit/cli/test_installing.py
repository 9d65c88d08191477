"""`prl plugins install`: which tool, what is protected, what is refused. `test_example_plugins.py` installs."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from prl.errors import EnvironmentNotFit, UsageError
from prl_cli import installing


def test_pip_is_used_where_there_is_one_and_uv_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "pip" else find(name))
    assert installing.installer("install")[:3] == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert installing.installer("install") == ["/bin/uv", "pip", "install", "--python", sys.executable]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentNotFit, match="ensurepip"):
        installing.installer("install")


@pytest.mark.parametrize(
    ("marker", "remedy"),
    [
        ("uv-receipt.toml", "uv tool install prl-console --with a --with b"),
        ("pipx_metadata.json", "pipx inject .* a b"),
    ],
)
def test_an_environment_of_another_tool_is_refused_with_the_command_that_lasts(
    marker: str, remedy: str, tmp_path: Path
) -> None:
    installing.refuse_foreign_environment(["a"], tmp_path)
    (tmp_path / marker).touch()
    with pytest.raises(UsageError, match=remedy):
        installing.refuse_foreign_environment(["a", "b"], tmp_path)


def test_the_operating_systems_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(installing.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UsageError, match=r"-m venv \.venv"):
        installing.refuse_foreign_environment(["a"], Path(sys.base_prefix))


def test_what_prl_runs_on_keeps_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = installing.protected()
    assert {"prl-core", "prl-console", "torch", "transformers"} <= set(kept)
    commands: list[list[str]] = []
    texts: list[str] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        texts.append(Path(command[command.index("--constraint") + 1]).read_text())

    monkeypatch.setattr(installing, "_run", run)
    listed: list[list[Any]] = [[], [("envs", "new", "acme")]]
    monkeypatch.setattr(installing, "_plugins", lambda: listed.pop(0))
    assert installing.install(["acme"], dry_run=True) == [("envs", "new", "acme")]
    assert commands[0][-2:] == ["--dry-run", "acme"]
    assert f"torch=={kept['torch']}\n" in texts[0]


def test_only_packages_that_provide_plugins_are_removed() -> None:
    with pytest.raises(UsageError, match="numpy provides no plugin; packages that do: .*prl-losses"):
        installing.uninstall(["numpy"])
    with pytest.raises(UsageError, match="prl-core provides no plugin"):
        installing.uninstall(["prl-core"])


def test_an_installer_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "installer", lambda action: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(installing.InstallFailed, match=r"exit code 3.*an environment of its own"):
        installing.install(["acme"])
