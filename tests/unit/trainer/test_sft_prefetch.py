"""Coming steps prepared ahead: the same in any number of workers, bounded, and with no process left behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prl.config.schema import SftConfig
from prl.errors import ConfigError, RunFailed
from prl.packing import DEFAULT_COST
from prl_trainer_fsdp.sft.feed import Feed
from prl_trainer_fsdp.sft.prefetch import Prefetcher, Process
from prl_trainer_fsdp.sft.steps import Part

from .sft_helpers import conversations, save_tokenizer, turns, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(out)
    (out / "config.json").write_text('{"model_type": "llama"}')
    return out


def feed(folder: Path, **data: Any) -> Feed:
    train = write_jsonl(folder / "train.jsonl", conversations())
    table = {"train": train, "steps": 8, "batch_size": 4, "shuffle": True, **data}
    config = {"model": {"path": str(folder)}, "data": table, "trainer": {"use": "fsdp", "row_tokens": 32}}
    return Feed(SftConfig.model_validate(config))


def parts(feed: Feed, rank: int = 0, ranks: int = 1, first: int = 1) -> list[Part]:
    feed.start(first, rank, ranks, DEFAULT_COST)
    try:
        return [feed.take(step) for step in range(first, feed.steps + 1)]
    finally:
        feed.close()


def test_workers_and_their_number_change_nothing(folder: Path) -> None:
    alone = parts(feed(folder))
    assert parts(feed(folder, workers=2)) == alone
    assert parts(feed(folder), first=5) == alone[4:]


def test_ranks_share_a_step(folder: Path) -> None:
    (whole,), left, right = (parts(feed(folder, steps=1), rank, ranks) for rank, ranks in ((0, 1), (0, 2), (1, 2)))
    halves = [left[0], right[0]]
    assert {len(part.rows) for part in halves} == {max(len(part.rows) for part in halves)}
    assert {part.trained for part in halves} == {whole.trained} and {part.examples for part in halves} == {4}
    rows = [row for part in halves for row in part.rows]
    assert sorted(n for row in rows for n in row.lengths) == sorted(n for row in whole.rows for n in row.lengths)


def test_what_is_wrong_in_a_worker_is_raised_at_its_step(folder: Path, tmp_path: Path) -> None:
    """A row of a dataset is looked at when it is read, and only the first 64 of them before the run: here one is wrong
    in step 2 of steps of 64."""
    datasets = pytest.importorskip("datasets", reason="the datasets library is optional")
    rows = (conversations() * 20)[:127]
    datasets.Dataset.from_list([*rows[:100], {"messages": turns("a")}, *rows[100:]]).save_to_disk(tmp_path / "data")
    data = {"train": str(tmp_path / "data"), "shuffle": False, "batch_size": 64, "steps": 2}
    wrong = "data:101: it has no token to train: its turns are user"
    found = feed(folder, workers=1, **data)
    found.start(1, 0, 1, DEFAULT_COST)
    try:
        assert found.take(1).examples == 64
        with pytest.raises(ConfigError, match=wrong):
            found.take(2)
    finally:
        found.close()
    skipped = parts(feed(folder, on_bad_row="skip", **data))
    assert [part.left_out for part in skipped] == [{}, {"bad_row": 1}]
    assert wrong in skipped[1].notes[0]


def test_a_worker_that_dies_ends_the_run_with_a_reason(folder: Path) -> None:
    found = feed(folder, workers=1, steps=10_000)
    found.start(1, 0, 1, DEFAULT_COST)
    try:
        found.take(1)
        assert found._prefetcher is not None
        (process,) = found._prefetcher._prepare
        assert isinstance(process, Process)
        process.process.kill()
        with pytest.raises(RunFailed, match=r"data.workers.*ended with code -9 at step"):
            for step in range(2, 10):
                found.take(step)
    finally:
        found.close()


def test_a_worker_does_not_outlive_its_trainer(folder: Path) -> None:
    """The trainer is killed; the worker's stdin ends with it."""
    orders = feed(folder, workers=1)._orders(0, 1, DEFAULT_COST)
    code = (
        "import os, sys, msgspec, time\n"
        "from prl_trainer_fsdp.sft.prefetch import Process\n"
        "from prl_trainer_fsdp.sft.worker import Orders\n"
        "process = Process(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Orders))\n"
        "process(1)\n"
        "print(process.process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.msgpack.encode(orders), capture_output=True, timeout=60, check=False
    )
    worker = int(done.stdout)
    deadline = time.monotonic() + 20
    while _lives(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(worker)


def _lives(pid: int) -> bool:
    """One that has ended and was not waited for by whoever took it over does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


def test_no_more_is_prepared_ahead_than_was_said() -> None:
    prepared: list[int] = []
    reached = threading.Event()

    def prepare(step: int) -> Part:
        prepared.append(step)
        if step == 4:  # one taken, two in the queue, one that waits for room
            reached.set()
        return Part([], step, 0, {}, [])

    prefetcher = Prefetcher([prepare], 1, 100, depth=2)
    try:
        assert prefetcher.take(1)[0].trained == 1
        assert reached.wait(10)
        time.sleep(0.3)
        assert prepared == [1, 2, 3, 4]
    finally:
        prefetcher.close()
    assert not any(thread.name.startswith("data-") for thread in threading.enumerate())


def test_a_step_that_is_never_ready_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl_trainer_fsdp.sft.prefetch.DEADLINE_S", 0.1)
    release = threading.Event()

    def prepare(step: int) -> Part:
        release.wait(20)
        return Part([], 1, 0, {}, [])

    prefetcher = Prefetcher([prepare], 1, 2, depth=1)
    try:
        with pytest.raises(RunFailed, match="step 1 were not prepared in"):
            prefetcher.take(1)
    finally:
        release.set()
        prefetcher.close()
