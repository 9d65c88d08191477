"""Bad input is refused before anything happens, and damaged files cost only themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .harness import Project, Run


def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_written(project: Project) -> None:
    wrong_tables = """
        [sampling_]
        [mismatch]
        probes = "four"
        [loss]
        use = "dpo"
        [algorithm]
        use = "./nowhere.py:Algorithm"
    """
    run = project.run(more=wrong_tables)
    before = sorted(project.folder.rglob("*"))
    done = run.finish("--set", "loop.group_sizes=3", "--set", "trainer.lr=-1")
    assert done.returncode == 2
    for wrong in ("sampling_", "probes", "dpo", "nowhere.py", "group_sizes", "trainer.lr"):
        assert wrong in done.stderr
    assert "(6 problems)" in done.stderr
    assert "did you mean" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    after = [path for path in sorted(project.folder.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


def test_a_model_that_is_not_there_is_named_before_anything_starts(project: Project) -> None:
    done = project.run().finish("--set", "model.path=./no/such/model")
    assert done.returncode == 2
    assert "no/such/model" in done.stderr
    assert not (project.folder / "runs").exists()


def test_a_run_that_exists_is_neither_overwritten_nor_continued_by_accident(project: Project, synchronous: Run) -> None:
    run = project.run()
    shutil.copytree(synchronous.dir.path, run.dir.path)
    before = {path: path.stat().st_mtime_ns for path in run.dir.path.rglob("*")}
    done = run.finish()
    assert done.returncode == 2
    assert "--resume" in done.stderr and "--clean" in done.stderr
    done = run.finish("--clean")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in run.dir.path.rglob("*")} == before


@pytest.fixture
def damaged(project: Project, synchronous: Run) -> Run:
    """A copy of a finished run: its newest checkpoint is truncated, others were never completed, its files are torn."""
    run = project.run()
    shutil.copytree(synchronous.dir.path, run.dir.path)
    newest = run.dir.checkpoint(6) / "trainer" / "rank-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    shutil.copytree(run.dir.checkpoint(4), run.dir.checkpoint(8))
    (run.dir.checkpoint(8) / "MANIFEST.json").unlink()
    (run.dir.checkpoints / "step_000009.tmp" / "trainer").mkdir(parents=True)
    (run.dir.checkpoints / "step_abc").mkdir()
    tear(run.dir.metrics)
    tear(run.dir.events)
    tear(run.dir.rollouts / "index.jsonl")
    parquet = run.dir.rollouts / "step_000006.parquet"
    parquet.write_bytes(parquet.read_bytes()[:50])
    return run


def tear(path: Path) -> None:
    """As a crash in the middle of a write leaves it."""
    path.write_bytes(path.read_bytes()[:-20])


def test_a_damaged_run_goes_on_from_its_last_good_state(damaged: Run, synchronous: Run) -> None:
    done = damaged.finish("--resume")
    assert done.returncode == 0, damaged.told(done)
    (resumed,) = damaged.events("resumed")
    assert resumed["step"] == 4
    said = "\n".join(resumed["warnings"])
    for what in (
        "rank-00000.safetensors",
        "step_000008",
        "step_000009.tmp",
        "step_abc",
        "metrics.jsonl",
        "events.jsonl",
    ):
        assert what in said
        assert what in done.stderr
        assert what in damaged.log("controller-0")
    assert damaged.computed() == synchronous.computed()
    assert damaged.weights(6) == synchronous.weights(6)


def test_a_run_that_is_complete_has_nothing_left_to_do(project: Project, synchronous: Run) -> None:
    run = project.run()
    shutil.copytree(synchronous.dir.path, run.dir.path)
    run.complete("--resume")
    assert run.computed() == synchronous.computed()
    assert run.weights(6) == synchronous.weights(6)
    assert run.summary["rollouts"] == synchronous.summary["rollouts"]


@pytest.mark.slow
def test_more_steps_are_really_run_after_the_end(project: Project, synchronous: Run) -> None:
    run = project.run(steps=8)
    shutil.copytree(synchronous.dir.path, run.dir.path)
    run.complete("--resume")
    assert [row["step"] for row in run.metrics() if "time/step" in row] == list(range(1, 9))
    assert run.steps_saved()[-1] == 8
