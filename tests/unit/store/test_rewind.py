"""Rewinding to a checkpoint's step: nothing counts twice, and an interrupted rewind can be repeated."""

from __future__ import annotations

import contextlib
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


def test_what_was_measured_of_an_install_that_is_done_again_is_dropped(run_dir: RunDir) -> None:
    """Whoever continues from a step installs its version, whether that had been installed or not."""
    writer = StoreWriter(run_dir)
    for step in (1, 2, 3):
        writer.metrics(step, {"loss": 0.0, "mismatch/kl": 0.0})
        writer.metrics(step, {"mismatch/probe_kl": 0.5, "mismatch/probe_tokens": 9})
    writer.close()
    rewind(run_dir, 2)
    metrics = open_run(run_dir.path).metrics
    assert metrics["step"].to_pylist() == [1, 1, 2]
    assert metrics["mismatch/probe_kl"].to_pylist() == [None, 0.5, None]


def test_torn_lines_are_cut_off_and_told(five_steps: RunDir) -> None:
    assert repair(five_steps) == []
    five_steps.metrics.write_bytes(five_steps.metrics.read_bytes()[:-5])
    (told,) = repair(five_steps)
    assert str(five_steps.metrics) in told
    assert open_run(five_steps.path).metrics["step"].to_pylist() == [1, 2, 3, 4]
    assert repair(five_steps) == []


def evaluation(make_record: MakeRecord, episode_id: int) -> RolloutRecord:
    record = make_record(episode_id, advantages=(None,))
    record.kind, record.status, record.group_id, record.credits = "eval", "eval", -1, []
    return record


def unused(make_record: MakeRecord, episode_id: int, group: int) -> RolloutRecord:
    record = make_record(episode_id)
    record.status, record.group_id, record.error, record.credits = "dropped", group, "stale", []
    return record


@pytest.fixture
def late(run_dir: RunDir, make_record: MakeRecord) -> RunDir:
    """The checkpoint is of step 2. What was handed over after that step was sealed: an evaluation of step 1, one of 2,
    one of 3, a dropped group 5 from before the checkpoint, and group 9 from after it."""
    writer = StoreWriter(run_dir)
    for step in (1, 2):
        writer.rollout(step, make_record(step))
        writer.metrics(step, {"loss": 0.0})
        writer.seal(step)
    writer.rollout(None, unused(make_record, 50, 5))
    for step in (1, 2):
        writer.rollout(step, evaluation(make_record, 100 + step))
        writer.metrics(step, {"eval/score": 0.5})
    writer.rollout(3, make_record(3))
    writer.rollout(None, unused(make_record, 90, 9))
    writer.metrics(3, {"loss": 0.0})
    writer.seal(3)
    writer.rollout(3, evaluation(make_record, 103))
    writer.metrics(3, {"eval/score": 0.5})
    writer.rollout(1, evaluation(make_record, 111))  # sealed by nobody yet
    writer.rollout(None, unused(make_record, 51, 5))
    writer.close()
    return run_dir


def settled(group: int) -> bool:
    return group < 6


def kept(run_dir: RunDir) -> list[tuple[int, int]]:
    """(episode, file) of every rollout, the same in the files and in the index."""
    run = open_run(run_dir.path)
    rows = []
    for file in range(6):
        rows += [(episode, file) for episode in run.rollouts(file)["episode_id"].to_pylist()]
    index = run.index
    assert sorted(zip(index["episode_id"].to_pylist(), index["file"].to_pylist())) == sorted(rows)
    assert run.problems == []
    return sorted(rows)


def test_what_was_filed_late_stays(late: RunDir) -> None:
    rewind(late, 2, settled=settled)
    assert kept(late) == [(1, 1), (2, 2), (50, 2), (51, 4), (101, 2), (102, 2), (111, 4)]


def test_an_evaluation_that_is_done_again_goes_with_its_episodes(late: RunDir, make_record: MakeRecord) -> None:
    rewind(late, 2, settled=settled, evaluated_again=True)
    assert kept(late) == [(1, 1), (2, 2), (50, 2), (51, 4), (101, 2), (111, 4)]
    writer = StoreWriter(late)
    writer.rollout(2, evaluation(make_record, 102))
    writer.metrics(2, {"eval/score": 0.5})
    for step in (3, 4):
        writer.rollout(step, make_record(step))
        writer.seal(step)
    writer.close()
    assert kept(late) == [(1, 1), (2, 2), (3, 3), (4, 4), (50, 2), (51, 4), (101, 2), (102, 3), (111, 4)]


def test_episodes_of_an_evaluation_without_its_means_go(late: RunDir) -> None:
    """It was cut off by the crash, and nobody finishes it."""
    lines = late.metrics.read_bytes().splitlines(keepends=True)
    late.metrics.write_bytes(b"".join(line for line in lines if not (b'"eval/' in line and b'"step":1' in line)))
    rewind(late, 2, settled=settled)
    assert kept(late) == [(1, 1), (2, 2), (50, 2), (51, 4), (102, 2)]


@pytest.mark.parametrize("at", range(1, 6))
def test_a_rewind_that_was_interrupted_is_repeated(late: RunDir, at: int) -> None:
    """Whichever of its writes is the last: nothing is lost, nothing is there twice."""
    faults.install("controller", plan=[Fault("controller", "store.write", "disk_full", at=at)])
    with contextlib.suppress(StoreError):
        rewind(late, 2, settled=settled)
    faults.install("controller", plan=[])
    rewind(late, 2, settled=settled)
    rewind(late, 2, settled=settled)
    assert kept(late) == [(1, 1), (2, 2), (50, 2), (51, 4), (101, 2), (102, 2), (111, 4)]


def test_a_rewind_to_a_step_without_a_file(run_dir: RunDir, make_record: MakeRecord) -> None:
    """A stop before the first step: the evaluation at the start was filed with the step that came next."""
    writer = StoreWriter(run_dir)
    writer.rollout(0, evaluation(make_record, 100))
    writer.metrics(0, {"eval/score": 0.5})
    writer.rollout(1, make_record(1))
    writer.seal(1)
    writer.close()
    rewind(run_dir, 0)
    assert kept(run_dir) == [(100, 0)]
