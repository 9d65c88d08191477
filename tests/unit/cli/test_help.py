"""Help is fast because it imports nothing; every command is in it, other packages' too."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from prl_cli.main import COMMANDS

FORBIDDEN = ("torch", "pydantic", "transformers", "textual", "numpy", "vllm", "pyarrow", "zmq", "aiohttp")
GUARD = """
import sys, json
from prl_cli.main import app
try:
    app(sys.argv[1:], prog_name="prl")
except SystemExit as end:
    code = end.code
print(json.dumps([code or 0, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def modules_after(*arguments: str, path: Path | None = None) -> tuple[int, set[str], str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path)] if path else [])}
    done = subprocess.run(
        [sys.executable, "-c", GUARD, *arguments], capture_output=True, text=True, env=env, timeout=60, check=True
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    return code, set(modules), done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("doctor", "--help"), ("runs",)])
def test_what_says_something_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code, modules, _ = modules_after(*arguments)
    assert code == 0
    # typer itself imports pydantic as soon as a command has arguments.
    allowed = set() if arguments == ("--help",) else {"pydantic"}
    assert not modules & (set(FORBIDDEN) - allowed)


def test_help_names_every_command() -> None:
    _, _, shown = modules_after("--help")
    for name, command in COMMANDS.items():
        assert any(line.split()[:1] == [name] and command.summary in line for line in shown.splitlines()), name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_the_first_line_of_the_commands_own_help(name: str) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    target: Any = getattr(importlib.import_module(module), attribute)
    told = target.info.help if isinstance(target, typer.Typer) else inspect.getdoc(target)
    assert told.splitlines()[0] == COMMANDS[name].summary


def test_a_misspelt_command_names_the_nearest(prl: Any) -> None:
    result = prl("stpo")
    assert result.exit_code == 2
    assert "'stop'" in result.stderr


def test_version(prl: Any) -> None:
    result = prl("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("prl 0.")


@pytest.fixture
def other_package(tmp_path: Path) -> Path:
    """An installed package, as far as metadata goes, with a command of its own."""
    info = tmp_path / "prl_greet-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prl-greet\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[prl.commands]\ngreet = prl_greet:GREET\nbroken = prl_nowhere:X\n")
    (tmp_path / "prl_greet.py").write_text(
        "import typer\n"
        "from prl.contribution import Contribution\n"
        "GREET = Contribution(factory='prl_greet:build', summary='Greet.')\n"
        "def build(config):\n"
        "    app = typer.Typer()\n"
        "    @app.command()\n"
        "    def greet(name: str): typer.echo(f'hello {name}')\n"
        "    return app\n"
    )
    return tmp_path


def test_commands_of_other_packages_are_listed_without_an_import(other_package: Path) -> None:
    _, modules, shown = modules_after("--help", path=other_package)
    assert any(line.split() == ["greet", "From", "prl-greet", "1.2."] for line in shown.splitlines())
    assert "prl_greet" not in modules


def test_commands_of_other_packages_run(other_package: Path) -> None:
    code, modules, shown = modules_after("greet", "world", path=other_package)
    assert (code, "prl_greet" in modules) == (0, True)
    assert "hello world" in shown


def test_a_broken_command_of_another_package_is_an_error_only_where_it_is_used(other_package: Path) -> None:
    assert modules_after("runs", path=other_package)[0] == 0
    assert modules_after("broken", path=other_package)[0] == 2
