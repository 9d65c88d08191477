"""`max_staleness = 4` with real processes: what is trained, judged by the files alone, also across a crash."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from prl.store.reader import open_run

from .harness import Project, Run, assert_adds_up

RANDOM = random.Random(time.time_ns())
K = 4
STEPS = 14


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Run:
    """A run whose controller was killed at a random moment, and that was resumed to its end."""
    run = Project(tmp_path_factory.mktemp("asynchronous"), tiny_model).run(steps=STEPS, staleness=K)
    slow = ("--set", "envs.0.seconds=0.3")
    with run.going(*slow) as process:
        run.wait_for_step(RANDOM.randint(3, STEPS - 6), process)
        time.sleep(RANDOM.uniform(0, 0.1))
        assert run.kill("controller-0")
        assert process.wait(timeout=120) == 1
    return run.complete("--resume", *slow)


def test_every_step_is_there_once(resumed: Run) -> None:
    steps = [row["step"] for row in resumed.metrics() if "time/step" in row]
    assert steps == list(range(1, STEPS + 1))
    assert resumed.summary["steps"] == STEPS
    assert sorted(resumed.dir.rollouts.glob("step_*.parquet"))[-1].stem == f"step_{STEPS:06d}"


def test_every_version_that_was_installed_says_once_how_far_engine_and_trainer_are_apart(resumed: Run) -> None:
    """Also where no token of a step was of the trainer's own version."""
    events = resumed.events("weights_installed")
    last = {event["version"]: event for event in events}
    probed = [row for row in resumed.metrics() if "mismatch/probe_kl" in row]
    steps = [row["step"] for row in probed]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS and len(steps) >= STEPS // (K + 2), "some are skipped"
    assert set(steps) <= set(last)
    assert all(row["mismatch/probe_tokens"] >= 8 and 0 <= row["mismatch/probe_kl"] < 1e-6 for row in probed)
    assert all(row["mismatch/probe_kl"] == last[row["step"]]["probe_kl"] for row in probed)


def test_the_ledger_adds_up_at_every_step_and_at_the_end(resumed: Run) -> None:
    for row in resumed.metrics():
        if "ledger/dispatched" in row:
            ended = sum(row[f"ledger/{name}"] for name in ("trained", "dropped", "failed", "pending"))
            assert row["ledger/dispatched"] == ended
    assert_adds_up(resumed.summary["rollouts"])
    assert resumed.status["ledger"] == resumed.summary["rollouts"]


def test_no_sample_trains_twice_and_all_that_count_as_trained_are_in_the_files(resumed: Run) -> None:
    rows = open_run(resumed.dir.path).rollouts().to_pylist()
    trained = [row["episode_id"] for row in rows if row["status"] == "trained"]
    assert max(Counter(trained).values()) == 1
    assert len(trained) == resumed.summary["rollouts"]["trained"]
    members = Counter(row["group_id"] for row in rows if row["status"] == "trained")
    assert max(members.values()) <= 4


def test_nothing_older_than_k_was_trained_as_the_tokens_themselves_say(resumed: Run) -> None:
    ages = []
    for row in open_run(resumed.dir.path).rollouts().to_pylist():
        if row["status"] == "trained":
            sampled = [version for version, was in zip(row["versions"], row["sampled"], strict=True) if was]
            ages.append(row["step"] - 1 - min(sampled))
    assert min(ages) >= 0
    assert max(ages) <= K
    assert max(ages) >= 1, "nothing was off-policy: this run was not asynchronous"
    assert resumed.summary["staleness"]["max"] == max(ages)


def test_evaluation_goes_on_beside_training(resumed: Run) -> None:
    evaluated = [row["step"] for row in resumed.metrics() if "eval/score" in row]
    assert evaluated[0] == 0 and evaluated[-1] == STEPS
    assert len(evaluated) >= 3  # those that fall due during another one become one
    assert all(row["eval/MyEnv/episodes"] == 8 for row in resumed.metrics() if "eval/score" in row)
    stored = [row for row in open_run(resumed.dir.path).rollouts().to_pylist() if row["kind"] == "eval"]
    assert {row["status"] for row in stored} == {"eval"}, "evaluation is no part of the ledger"


def test_every_evaluation_keeps_its_episodes(resumed: Run) -> None:
    evaluated = [row["step"] for row in resumed.metrics() if "eval/score" in row]
    stored = [row for row in open_run(resumed.dir.path).rollouts().to_pylist() if row["kind"] == "eval"]
    assert Counter(row["step"] for row in stored) == dict.fromkeys(evaluated, 8)


def test_every_episode_that_was_dropped_is_in_the_files(resumed: Run) -> None:
    """Also those that left between the last step before a checkpoint and the checkpoint."""
    rows = open_run(resumed.dir.path).rollouts().to_pylist()
    dropped = resumed.summary["rollouts"]["dropped"]
    assert sum(row["status"] == "dropped" for row in rows) == sum(dropped.values())
