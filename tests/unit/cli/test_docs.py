"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_reference_of_the_commands_is_current() -> None:
    code = "import cli_reference as r; print(r.updated(r.PAGE.read_text()) == r.PAGE.read_text())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DOCS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "True", f"run `python docs/cli_reference.py` {done.stderr}"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 130])
def test_every_exit_code_is_documented(code: int) -> None:
    assert f"| {code} |" in (DOCS / "cli.md").read_text()
