"""Who imports what when it runs: the static contracts, and sys.modules of fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Distribution

HEAVY = ("torch", "transformers", "vllm", "safetensors", "tokenizers", "textual")
HELP = "import sys; sys.argv = ['prl', '--help']\nfrom prl_cli.main import main\ntry: main()\nexcept SystemExit: pass"


def loaded_by(code: str, *forbidden: str) -> list[str]:
    """Which of `forbidden` a fresh interpreter has imported after running `code`."""
    script = (
        f"{code}\nimport json, sys\nprint('\\n' + json.dumps([name for name in {forbidden!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_help_imports_nothing_heavy() -> None:
    assert loaded_by(HELP, *HEAVY, "pydantic", "numpy", "pyarrow", "aiohttp", "zmq", "prl.config.schema") == []


def test_importing_prl_costs_nothing() -> None:
    assert loaded_by("import prl", *HEAVY, "pydantic", "numpy", "pyarrow", "aiohttp", "zmq", "pluggy", "msgspec") == []


@pytest.mark.parametrize("module", ["prl.config.load", "prl.controller", "prl.envworker", "prl.registry", "prl.loop"])
def test_the_core_runs_without_torch_and_terminal_libraries(module: str) -> None:
    assert loaded_by(f"import {module}", *HEAVY, "typer", "rich") == []


def test_reading_and_checking_configurations_imports_no_store_and_no_wire() -> None:
    assert loaded_by("import prl.config.load, prl.registry", "pyarrow", "zmq", "aiohttp") == []


def test_declarations_import_nothing_heavy(distributions: list[Distribution]) -> None:
    modules = [
        f"{dist.package}.{name}"
        for dist in distributions
        for name in ("plugin", "config")
        if dist.folder.startswith("plugins") and (dist.path / dist.package / f"{name}.py").exists()
    ]
    assert len(modules) > 8
    code = "\n".join(f"import {module}" for module in modules)
    assert loaded_by(code, *HEAVY, "numpy", "pyarrow", "aiohttp", "zmq", "typer", "rich") == []


def test_import_contracts_hold(root: Path) -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout
