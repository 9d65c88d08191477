"""Rewinding to a checkpoint's step: nothing counts twice, and an interrupted rewind can be repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prl import faults
from prl.errors import StoreError
from prl.faults import Fault
from prl.rundir import RunDir
from prl.store import RolloutRecord, StoreWriter, open_run, rewind
from prl.store.rewind import repair

MakeRecord = Callable[..., RolloutRecord]


@pytest.fixture
def five_steps(run_dir: RunDir, make_record: MakeRecord) -> RunDir:
    """Steps 1 to 4 are sealed, step 5 is not."""
    writer = StoreWriter(run_dir)
    for step in range(1, 6):
        writer.rollout(step, make_record(step))
        writer.metrics(step, {"loss": float(step)})
        writer.event("step", step=step)
        if step < 5:
            writer.seal(step)
    writer.close()
    return run_dir


def steps(run_dir: RunDir) -> tuple[list[int], list[int], list[int]]:
    run = open_run(run_dir.path)
    return (
        run.metrics["step"].to_pylist(),
        run.rollouts()["episode_id"].to_pylist(),
        run.index["episode_id"].to_pylist(),
    )


@pytest.mark.parametrize("step", [1, 3, 4, 5, 9])
def test_later_steps_are_dropped_and_events_kept(five_steps: RunDir, step: int) -> None:
    dropped = rewind(five_steps, step)
    expected = list(range(1, min(step, 5) + 1))
    assert steps(five_steps) == (expected, expected, expected)
    assert dropped["metrics"] == dropped["index"] == dropped["sealed"] + dropped["unsealed"] == 5 - len(expected)
    assert len(open_run(five_steps.path).events) == 5
    assert rewind(five_steps, step) == {"metrics": 0, "index": 0, "sealed": 0, "unsealed": 0}


def test_a_resumed_run_equals_an_uninterrupted_one(five_steps: RunDir, make_record: MakeRecord) -> None:
    rewind(five_steps, 3)
    writer = StoreWriter(five_steps)
    for step in (4, 5):
        writer.rollout(step, make_record(step))
        writer.metrics(step, {"loss": float(step)})
        writer.seal(step)
    writer.close()
    assert steps(five_steps) == ([1, 2, 3, 4, 5],) * 3


def test_torn_and_damaged_lines_go_too(five_steps: RunDir) -> None:
    with five_steps.metrics.open("ab") as file:
        file.write(b'not json\n{"step": 2')
    rewind(five_steps, 5)
    run = open_run(five_steps.path)
    assert run.metrics["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert run.problems == []


def test_a_full_disk_leaves_everything_as_it_was(five_steps: RunDir) -> None:
    faults.install("controller", plan=[Fault("controller", "store.write", "disk_full", at=1)])
    with pytest.raises(StoreError, match="disk is full"):
        rewind(five_steps, 2)
    assert steps(five_steps)[0] == [1, 2, 3, 4, 5]
    rewind(five_steps, 2)
    assert steps(five_steps) == ([1, 2],) * 3


def test_a_run_that_wrote_nothing(run_dir: RunDir) -> None:
    assert set(rewind(run_dir, 0).values()) == {0}


def test_an_evaluation_that_is_done_again_is_dropped(run_dir: RunDir) -> None:
    """A checkpoint is written before the evaluation of its step: whoever continues from it evaluates again."""
    writer = StoreWriter(run_dir)
    for step in (1, 2):
        writer.metrics(step, {"loss": 0.0})
        writer.metrics(step, {"eval/score": 0.5})
    writer.close()
    rewind(run_dir, 2)
    assert open_run(run_dir.path).metrics["step"].to_pylist() == [1, 1, 2, 2]
    rewind(run_dir, 2, evaluated_again=True)
    metrics = open_run(run_dir.path).metrics
    assert metrics["step"].to_pylist() == [1, 1, 2]
    assert metrics["eval/score"].to_pylist() == [None, 0.5, None]


def test_torn_lines_are_cut_off_and_told(five_steps: RunDir) -> None:
    assert repair(five_steps) == []
    five_steps.metrics.write_bytes(five_steps.metrics.read_bytes()[:-5])
    (told,) = repair(five_steps)
    assert str(five_steps.metrics) in told
    assert open_run(five_steps.path).metrics["step"].to_pylist() == [1, 2, 3, 4]
    assert repair(five_steps) == []
