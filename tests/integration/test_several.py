"""More than one process of a role: engines that share the work, and a trainer of several ranks."""

from __future__ import annotations

import pytest

from .harness import Project, Run, assert_adds_up
from .listening import listening

pytestmark = pytest.mark.slow


def test_two_engines_sample_the_same_bits_as_one(project: Project, synchronous: Run) -> None:
    run = project.run().complete("--set", "engine.replicas=2")
    assert "engine-1 registered" in run.log("controller-0")
    assert run.computed() == synchronous.computed()
    assert run.weights(6) == synchronous.weights(6)


def test_training_goes_on_with_the_engine_that_is_left(project: Project) -> None:
    run = project.run(steps=20, staleness=4)
    with run.going("--set", "engine.replicas=2", "--set", "envs.0.seconds=0.3") as process:
        run.wait_for_step(5, process)
        assert run.kill("engine-1")
        assert process.wait(timeout=200) == 0, run.output()
    assert [row["step"] for row in run.metrics() if "time/step" in row] == list(range(1, 21))
    assert_adds_up(run.summary["rollouts"])
    assert run.summary["staleness"]["max"] <= 4


def test_ranks_train_together_stay_on_loopback_and_end_together(project: Project) -> None:
    run = project.run(steps=60, staleness=4)
    settings = ("--set", "trainer.processes=2", "--set", "envs.0.seconds=0.3")
    with run.going(*settings) as process:
        run.wait_for_step(3, process)
        assert run.status["roles"].keys() >= {"trainer-0", "trainer-1"}
        assert {address for pid in run.alive() for address, _ in listening(pid)} == {"127.0.0.1"}
        assert run.kill("trainer-0")
        assert process.wait(timeout=120) == 1, run.output()
    (said,) = [line for line in run.output().splitlines() if line.startswith("prl: ")]
    assert "trainer-0 was killed by SIGKILL" in said
    assert run.alive() == []
    run.complete("--resume", *settings, "--set", "loop.steps=8")
    assert run.steps_saved()[-1] >= 8
    assert_adds_up(run.summary["rollouts"])


def test_ranks_that_share_every_row_train_a_run_in_several_updates(project: Project) -> None:
    """Context parallelism from the command line: one rank is sent samples, both train, engines verify."""
    run = project.run(steps=4).complete(
        *("--set", "trainer.processes=2", "--set", "trainer.cp=2", "--set", "trainer.updates_per_batch=2")
    )
    roles = run.status["roles"]
    assert [roles[f"trainer-{rank}"]["info"]["row_rank"] for rank in (0, 1)] == [0, 1]
    steps = [row for row in run.metrics() if "time/step" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["mismatch/kl"] < 1e-4 and row["drift/tokens"] > 0 for row in steps)
    assert_adds_up(run.summary["rollouts"])
