"""What the shell offers when a word is completed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prl.rundir import RunDir


def offered(folder: Path, *words: str) -> list[str]:
    env = {
        **os.environ,
        "_PRL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("prl", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "prl_cli"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.split()


@pytest.fixture
def folder(project: Path) -> Path:
    run = RunDir(project / "runs" / "first-run")
    run.control.mkdir(parents=True)
    run.config.write_text("{}")
    return project


def test_commands(folder: Path) -> None:
    assert offered(folder, "che") == ["checkpoint"]


def test_names_of_runs(folder: Path) -> None:
    assert offered(folder, "stop", "fi") == ["first-run"]


def test_configuration_files(folder: Path) -> None:
    assert offered(folder, "run", "ru") == ["run.toml", "runs/"]


def test_options_of_a_command(folder: Path) -> None:
    assert offered(folder, "run", "--re") == ["--resume"]
