"""`max_staleness = 0` on a CPU: the same bits again, also after a crash at any moment."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from .harness import Project, Run, assert_adds_up

RANDOM = random.Random(time.time_ns())
"""Where a run is killed is new every time; the message of a failed assertion says where it was."""


def assert_same(run: Run, expected: Run, said: str = "") -> None:
    """Every metric and every trained and optimiser tensor are the same bits."""
    assert run.computed() == expected.computed(), said
    last = expected.steps_saved()[-1]
    assert run.steps_saved()[-1] == last, said
    assert run.weights(last) == expected.weights(last), said
    for key in ("rollouts", "tokens_trained", "tokens_generated", "eval_first", "eval_last", "steps"):
        assert run.summary[key] == expected.summary[key], (key, said)


def test_it_learns_from_a_reward_in_a_file_and_counts_every_episode(synchronous: Run) -> None:
    rows = synchronous.computed()
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/score" in row] == [0, 2, 4, 6]
    assert all(row["staleness/max"] == 0 for row in rows if "staleness/max" in row)
    assert all(0 < row["train/entropy"] < 5 for row in rows if "train/entropy" in row)
    assert synchronous.weights(2) != synchronous.weights(6)
    summary = synchronous.summary
    assert (summary["outcome"], summary["steps"]) == ("completed", 6)
    assert summary["rollouts"]["dispatched"] >= 96
    assert summary["rollouts"]["pending"] == 0
    assert_adds_up(summary["rollouts"])


def test_the_same_seed_gives_the_same_bits(project: Project, synchronous: Run) -> None:
    assert_same(project.run().complete(), synchronous)


@pytest.mark.slow
def test_conversations_of_several_turns_are_repeatable_too(project: Project) -> None:
    one, two = (project.run(name) for name in ("one", "two"))
    for run in (one, two):
        run.complete("--set", "envs.0.turns=3")
    assert_same(one, two)
    assert all(row["rollout/turns"] == 3 for row in one.metrics() if "rollout/turns" in row)


@pytest.mark.slow
def test_an_engine_that_is_killed_and_started_again_changes_nothing(project: Project, synchronous: Run) -> None:
    run = project.run()
    with run.going() as process:
        run.wait_for_step(RANDOM.randint(1, 4), process)
        time.sleep(RANDOM.uniform(0, 0.1))
        run.kill("engine-0")
        assert process.wait(timeout=200) == 0, run.output()
    assert_same(run, synchronous)


@pytest.mark.parametrize("role", ["controller-0", pytest.param("launcher", marks=pytest.mark.slow)])
def test_a_kill_at_a_random_moment_and_a_resume_change_nothing(project: Project, synchronous: Run, role: str) -> None:
    run = project.run()
    step, pause = RANDOM.randint(1, 5), RANDOM.uniform(0, 0.15)
    with run.going() as process:
        run.wait_for_step(step, process)
        time.sleep(pause)
        if role == "launcher":
            process.kill()
        else:
            run.kill(role)
        code = process.wait(timeout=120)
    assert code in (-signal.SIGKILL if role == "launcher" else 1, 0)  # 0: it was over already
    run.complete("--resume")
    assert_same(run, synchronous, f"killed {role} {pause:.3f} s after step {step}")


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_changes_nothing(project: Project, synchronous: Run) -> None:
    """Training has gone on from the snapshot; the checkpoint was never completed, so the run begins before it."""
    slow = '[[faults]]\nrole = "trainer"\npoint = "trainer.write"\naction = "delay"\nprobability = 1.0\nseconds = 2.0\n'
    run = project.run(more=slow)
    with run.going() as process:
        run.wait_for_step(3, process)
        assert run.steps_saved() == [], "the step after the snapshot has waited for the disk"
        run.kill("controller-0")
        assert process.wait(timeout=120) == 1
    run.complete("--resume")
    assert_same(run, synchronous)
    assert [row for row in run.metrics() if "time/checkpoint" in row], "nobody said how long the trainer stood still"


def test_nothing_of_a_killed_run_survives(project: Project) -> None:
    run = project.run(steps=1000)
    with run.going() as process:
        run.wait_for_step(1, process)
        assert len(run.alive()) >= 5
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
    assert run.alive() == []
