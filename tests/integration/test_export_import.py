"""Weights leave a run as a folder, come back into it, and the run goes on with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from .harness import Project, Run

pytestmark = pytest.mark.slow


@pytest.fixture
def finished(project: Project, synchronous: Run) -> Run:
    run = project.run(steps=8)
    shutil.copytree(synchronous.dir.path, run.dir.path)
    return run


def test_a_run_goes_on_from_weights_that_were_edited(finished: Run) -> None:
    from safetensors.torch import load_file, save_file

    project, out = finished.project, finished.project.folder / "out"
    assert project.prl("export", finished.name, str(out), "--dtype", "float32").returncode == 0
    before = finished.weights(6)
    done = project.prl("import", str(out), finished.name, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["step"] == 6
    parameters = {name: value for name, value in tensors(finished, 6).items() if name.startswith("parameter/")}
    same = load_file(Path(told["replaced"]) / "step_000006" / "trainer" / "rank-00000.safetensors")
    assert all((same[name] == value).all() for name, value in parameters.items()), "not the bits that were exported"
    assert (
        Path(told["replaced"]) / "step_000006" / "trainer" / "rank-00000.safetensors"
    ).read_bytes() in before.values()
    weights = load_file(out / "model.safetensors")
    weights["model.norm.weight"] *= 0.5
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    assert project.prl("import", str(out), finished.name).returncode == 0
    assert (tensors(finished, 6)["parameter/model.norm.weight"] == weights["model.norm.weight"]).all()
    finished.complete("--resume")
    assert [row["step"] for row in finished.metrics() if "time/step" in row] == list(range(1, 9))
    (resumed,) = finished.events("resumed")
    assert resumed["step"] == 6 and resumed["warnings"] == []


def test_a_run_that_goes_on_takes_no_import(finished: Run) -> None:
    with finished.going("--resume") as process:
        finished.wait_for_step(7, process)
        done = finished.project.prl("import", str(finished.project.model), finished.name)
        assert done.returncode == 2 and "is going on" in done.stderr


def tensors(run: Run, step: int) -> dict:  # type: ignore[type-arg]
    from safetensors.torch import load_file

    return load_file(run.dir.checkpoint(step) / "trainer" / "rank-00000.safetensors")


def test_a_run_is_not_continued_with_another_model(finished: Run) -> None:
    """Refused before its weights are read: there are none."""
    other = finished.project.folder / "wider"
    shutil.copytree(finished.project.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    done = finished.finish("--resume", "--set", f"model.path={other}", "--set", "model.impl=hf")
    assert done.returncode == 1, finished.told(done)
    said = next(line for line in done.stderr.splitlines() if "belongs to another model" in line)
    assert "'model.layers.0.mlp.gate_proj.weight' is [64, 32] there, [96, 32] here" in said
    assert "loading the model" not in finished.log("trainer-0")
    assert finished.steps_saved()[-1] == 6
