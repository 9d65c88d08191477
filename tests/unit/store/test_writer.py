"""StoreWriter and RunReader: what is written comes back, also while it is written and after a crash."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prl import faults
from prl.errors import StoreError
from prl.faults import Fault
from prl.rundir import RunDir
from prl.store import RolloutRecord, StoreWriter, open_run
from prl.types import RolloutHeader

MakeRecord = Callable[..., RolloutRecord]


def episodes(run_dir: RunDir, step: int | None = None) -> list[int]:
    return open_run(run_dir.path).rollouts(step)["episode_id"].to_pylist()


def test_metrics_events_and_documents_come_back(run_dir: RunDir, writer: StoreWriter) -> None:
    writer.metrics(1, {"loss": 0.5, "note": "warm"})
    writer.metrics(2, {"loss": float("nan"), "reward/mean": 1})
    writer.event("checkpoint", step=2)
    writer.status({"step": 2})
    writer.summary({"outcome": "finished"})
    writer.flush()
    run = open_run(run_dir.path)
    table = run.metrics
    assert table["step"].to_pylist() == [1, 2]
    assert table["loss"].to_pylist() == [0.5, None]
    assert table["reward/mean"].to_pylist() == [None, 1.0]
    assert table["note"].to_pylist() == ["warm", None]
    assert table["time"].to_pylist()[0] == pytest.approx(time.time(), abs=60)
    assert [(event["kind"], event["step"]) for event in run.events] == [("checkpoint", 2)]
    assert run.status == {"step": 2}
    assert run.summary == {"outcome": "finished"}
    assert run.config == {}
    assert run.problems == []


@pytest.mark.parametrize("sealed", [False, True])
def test_a_rollout_comes_back_whole(
    run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord, sealed: bool
) -> None:
    writer.rollout(3, make_record(42, (4, 2), (0.5, None), version=2))
    if sealed:
        writer.seal(3)
    writer.flush()
    assert (run_dir.rollouts / "step_000003.parquet").exists() == sealed
    (row,) = open_run(run_dir.path).rollouts(3).to_pylist()
    assert json.loads(row.pop("messages"))[1] == {"role": "assistant", "content": "answer 42"}
    assert json.loads(row.pop("rewards")) == {"exact": {"score": 0.75, "weight": 1.0}}
    assert json.loads(row.pop("metrics")) == {"exact": 1.0}
    assert row == {
        "episode_id": 42,
        "step": 3,
        "env": "echo",
        "task_id": "task-42",
        "group_id": 7,
        "agent": "policy",
        "kind": "train",
        "status": "trained",
        "reward": 0.75,
        "stop_reason": "stop",
        "truncated": False,
        "num_turns": 1,
        "seconds": 0.25,
        "error": "",
        "sample_lengths": [4, 2],
        "token_ids": [200, 201, 202, 203, 200, 201],
        "sampled": [False, True, True, True, False, True],
        "logprobs": [0.0, -0.5, -0.5, -0.5, 0.0, -0.5],
        "versions": [-1, 2, 2, 2, -1, 2],
        "advantages": [0.5, 0.5, 0.5, 0.5, 0.0, 0.0],
    }


def test_rollouts_without_credit_tokens_or_anything(run_dir: RunDir, writer: StoreWriter) -> None:
    pair = (RolloutHeader("a", True, None, {}, ()), RolloutHeader("b", False, 1.0, {}, ()))
    writer.rollout(1, RolloutRecord(1, "echo", "t", 0, "eval", "eval", pair))
    writer.rollout(None, RolloutRecord(None, "echo", "t", 0, "train", "failed", error="env_error: boom"))
    writer.seal(1)
    writer.flush()
    table = open_run(run_dir.path).rollouts(1)
    assert table["agent"].to_pylist() == ["a", "b", None]
    assert table["step"].to_pylist() == [1, 1, None]
    assert table["reward"].to_pylist() == [None, 1.0, None]
    assert table["advantages"].to_pylist() == [None, None, None]
    assert table["token_ids"].to_pylist() == [[], [], []]
    assert table["error"].to_pylist() == ["", "", "env_error: boom"]
    assert open_run(run_dir.path).index["status"].to_pylist() == ["eval", "eval", "failed"]


def test_the_index_has_a_line_for_every_rollout(run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord) -> None:
    writer.rollout(1, make_record(1, (4, 2), (0.5, -0.25), version=3))
    writer.flush()
    (line,) = open_run(run_dir.path).index.to_pylist()
    assert line["advantage"] == pytest.approx((4 * 0.5 - 2 * 0.25) / 6)
    assert (line["num_tokens"], line["num_sampled"], line["min_version"], line["reward"]) == (6, 4, 3, 0.75)


def test_a_seal_takes_its_step_and_leaves_later_ones_open(
    run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord
) -> None:
    writer.rollout(2, make_record(20))
    writer.rollout(1, make_record(10))
    writer.rollout(None, make_record(11))
    writer.seal(1)
    writer.flush()
    assert (episodes(run_dir, 1), episodes(run_dir, 2), episodes(run_dir)) == ([10, 11], [20], [10, 11, 20])
    writer.rollout(1, make_record(12))  # late: step 1 is sealed, so it goes with the next one
    writer.seal(2)
    writer.flush()
    assert (episodes(run_dir, 1), episodes(run_dir, 2)) == ([10, 11], [20, 12])
    assert (run_dir.rollouts / "open.msgpack").stat().st_size == 0


def test_only_every_nth_step_is_kept(run_dir: RunDir, make_record: MakeRecord) -> None:
    writer = StoreWriter(run_dir, every=2)
    for step in (1, 2, 3, 4):
        writer.rollout(step, make_record(step))
        writer.seal(step)
    writer.close()
    assert episodes(run_dir) == [2, 4]
    assert open_run(run_dir.path).index["episode_id"].to_pylist() == [2, 4]


def test_no_rollouts_at_all(run_dir: RunDir, make_record: MakeRecord) -> None:
    writer = StoreWriter(run_dir, rollouts=False)
    writer.rollout(1, make_record(1))
    writer.seal(1)
    writer.close()
    assert open_run(run_dir.path).rollouts().num_rows == 0


# --- after a crash ---


def test_unsealed_rollouts_survive_and_are_sealed_by_the_next_process(run_dir: RunDir, make_record: MakeRecord) -> None:
    first = StoreWriter(run_dir)
    first.rollout(1, make_record(1))
    first.close()
    second = StoreWriter(run_dir)
    second.rollout(1, make_record(2))
    second.seal(1)
    second.close()
    assert episodes(run_dir, 1) == [1, 2]


@pytest.mark.parametrize("cut", [1, 3, 10, 100])
def test_a_torn_frame_costs_itself_only(run_dir: RunDir, make_record: MakeRecord, cut: int) -> None:
    first = StoreWriter(run_dir)
    first.rollout(1, make_record(1))
    first.rollout(1, make_record(2))
    first.close()
    path = run_dir.rollouts / "open.msgpack"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - cut])
    run = open_run(run_dir.path)
    assert run.rollouts()["episode_id"].to_pylist() == [1]
    assert "open.msgpack" in run.problems[0]
    second = StoreWriter(run_dir)
    second.rollout(1, make_record(3))
    second.flush()
    assert episodes(run_dir) == [1, 3]
    second.seal(1)
    second.close()
    assert episodes(run_dir) == [1, 3]


def test_a_crash_between_sealing_and_emptying_counts_nothing_twice(run_dir: RunDir, make_record: MakeRecord) -> None:
    writer = StoreWriter(run_dir)
    writer.rollout(1, make_record(1))
    writer.flush()
    unsealed = (run_dir.rollouts / "open.msgpack").read_bytes()
    writer.seal(1)
    writer.close()
    (run_dir.rollouts / "open.msgpack").write_bytes(unsealed)
    assert episodes(run_dir) == [1]
    second = StoreWriter(run_dir)
    second.rollout(2, make_record(2))
    second.seal(2)
    second.close()
    assert episodes(run_dir) == [1, 2]


def test_a_torn_line_is_left_out_and_cut_off(run_dir: RunDir, writer: StoreWriter) -> None:
    writer.metrics(1, {"loss": 1.0})
    writer.flush()
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    run = open_run(run_dir.path)
    assert run.metrics["step"].to_pylist() == [1]
    assert "metrics.jsonl" in run.problems[0]
    second = StoreWriter(run_dir)
    second.metrics(3, {"loss": 3.0})
    second.close()
    assert open_run(run_dir.path).metrics["step"].to_pylist() == [1, 3]


def test_an_unreadable_parquet_file_is_named_and_the_others_are_read(
    run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord
) -> None:
    for step in (1, 2):
        writer.rollout(step, make_record(step))
        writer.seal(step)
    writer.flush()
    broken = run_dir.rollouts / "step_000001.parquet"
    broken.write_bytes(broken.read_bytes()[:-30])
    run = open_run(run_dir.path)
    assert run.rollouts()["episode_id"].to_pylist() == [2]
    assert "step_000001.parquet" in run.problems[0]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run directory"):
        open_run(tmp_path)


# --- a disk that fills ---


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_full_disk_is_reported_and_leaves_the_files_good(
    run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord, at: int
) -> None:
    """Whichever write it is that fails: index, frames, Parquet, or a line."""
    writer.metrics(1, {"loss": 1.0})
    writer.rollout(1, make_record(1))
    writer.seal(1)
    writer.flush()
    faults.install("controller", plan=[Fault("controller", "store.write", "disk_full", at=at)])
    with pytest.raises(StoreError) as raised:
        writer.rollout(2, make_record(2))
        writer.seal(2)
        writer.metrics(2, {"loss": 2.0})
        writer.flush()
    message = str(raised.value)
    assert str(run_dir.path) in message and "disk is full" in message and "--resume" in message
    assert writer.error is not None
    with pytest.raises(StoreError, match="disk is full"):
        writer.metrics(3, {})
    with pytest.raises(StoreError, match="disk is full"):
        asyncio.run(writer.ready())
    with pytest.raises(StoreError, match="disk is full"):
        writer.close()
    run = open_run(run_dir.path)
    assert run.metrics["step"].to_pylist()[0] == 1
    assert run.rollouts(1)["episode_id"].to_pylist() == [1]
    assert run.problems == []
    assert not list(run_dir.rollouts.glob("*.tmp"))


def test_a_line_that_was_written_in_part_is_taken_back(
    run_dir: RunDir, writer: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    writer.metrics(1, {"loss": 1.0})
    writer.flush()
    whole_write = os.write
    calls: list[int] = []

    def half_then_full(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) == 1:
            return whole_write(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="disk is full"):
        patch.setattr("prl.store.files.os.write", half_then_full)
        writer.metrics(2, {"loss": 2.0})
        writer.flush()
    assert len(calls) == 2
    assert run_dir.metrics.read_bytes().count(b"\n") == 1
    assert run_dir.metrics.read_bytes().endswith(b"\n")


def test_a_record_that_cannot_be_stored_is_an_error_not_a_silent_end(
    run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord
) -> None:
    record = make_record(1)
    record.bodies = record.bodies[:-1]
    writer.rollout(1, record)
    writer.seal(1)
    with pytest.raises(StoreError, match="seal"):
        writer.flush()


# --- backpressure ---


def test_ready_waits_while_the_queue_is_full(run_dir: RunDir) -> None:
    writer = StoreWriter(run_dir, queue=10)
    entered, release = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        release.wait(10)

    async def main() -> None:
        writer._put(block)
        await asyncio.to_thread(entered.wait, 10)
        for step in range(10):
            writer.metrics(step, {})
        waiting = asyncio.create_task(writer.ready())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        release.set()
        await asyncio.wait_for(waiting, 10)
        assert writer.backlog < 10

    asyncio.run(main())
    writer.close()
    assert open_run(run_dir.path).metrics.num_rows == 10


def test_ready_returns_at_once_while_there_is_room(writer: StoreWriter) -> None:
    async def main() -> None:
        writer.metrics(1, {})
        await asyncio.wait_for(writer.ready(), 0.01)

    asyncio.run(main())


def test_handing_over_is_cheap(writer: StoreWriter, make_record: MakeRecord) -> None:
    """It is the event loop's time: 0.4 us measured, so 20 us leaves room for a busy machine and none for encoding."""
    record = make_record(1, (1000,))
    start = time.thread_time()
    for _ in range(1000):
        writer.rollout(1, record)
    assert (time.thread_time() - start) / 1000 < 20e-6


def test_a_closed_writer_refuses(run_dir: RunDir) -> None:
    writer = StoreWriter(run_dir)
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.metrics(1, {})


def test_a_run_shows_itself_in_one_line_even_when_its_status_is_damaged(run_dir: RunDir) -> None:
    run_dir.status.write_text('{"state": "running", "step": 7}')
    assert repr(open_run(run_dir.path)) == f"<run {run_dir.path}: running, step 7>"
    run_dir.status.write_text('{"state": ')
    assert repr(open_run(run_dir.path)) == f"<run {run_dir.path}: ?, step ?>"
