from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prl import faults
from prl.rundir import RunDir
from prl.store import RolloutRecord, StoreWriter
from prl.types import Credit, Message, Reward, RolloutHeader, SampleBody, SampleHeader

MakeRecord = Callable[..., RolloutRecord]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.config.write_text("{}")
    return run_dir


@pytest.fixture
def writer(run_dir: RunDir) -> Iterator[StoreWriter]:
    writer = StoreWriter(run_dir)
    yield writer
    if writer.error is None:
        writer.close()


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    faults.install("nobody", plan=[])


def make_sample(num_tokens: int, version: int) -> tuple[SampleHeader, bytes]:
    sampled = np.arange(num_tokens) >= 1
    body = SampleBody(
        (np.arange(num_tokens) + 100 * version).astype("<i4").tobytes(),
        sampled.tobytes(),
        np.where(sampled, -0.5, 0).astype("<f4").tobytes(),
        np.where(sampled, version, -1).astype("<i4").tobytes(),
    )
    header = SampleHeader(num_tokens, ((1, num_tokens - 1),), version, version)
    return header, msgspec.msgpack.encode(body)


@pytest.fixture
def make_record() -> MakeRecord:
    """An episode of one rollout whose samples have the given lengths and advantages."""

    def make(
        episode_id: int,
        lengths: tuple[int, ...] = (4,),
        advantages: tuple[float | None, ...] = (0.5,),
        version: int = 0,
    ) -> RolloutRecord:
        samples = [make_sample(length, version) for length in lengths]
        rollout = RolloutHeader(
            "policy", True, 0.75, {"exact": Reward(0.75)}, tuple(h for h, _ in samples), num_turns=1
        )
        credits = [
            None if value is None else Credit(((length, value),), ((length, 1.0),))
            for length, value in zip(lengths, advantages)
        ]
        transcript = msgspec.msgpack.encode([[Message("user", "hi"), Message("assistant", f"answer {episode_id}")]])
        return RolloutRecord(
            episode_id,
            "echo",
            f"task-{episode_id}",
            7,
            "train",
            "trained",
            (rollout,),
            [body for _, body in samples],
            credits,
            transcript,
            {"exact": 1.0},
            0.25,
        )

    return make
