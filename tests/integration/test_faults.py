"""Failures that are injected into real processes: the run goes on, or ends with one cause that names the log."""

from __future__ import annotations

import signal
import subprocess

import pytest

from .harness import Project, Run, assert_adds_up, wait_until

pytestmark = pytest.mark.slow


def fault(role: str, point: str, action: str, **more: object) -> str:
    """One `[[faults]]` table."""
    keys = {"role": role, "point": point, "action": action, **more}
    return "[[faults]]\n" + "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in keys.items())


def assert_whole(run: Run, steps: int) -> None:
    """All steps once, and an account of every episode."""
    assert [row["step"] for row in run.metrics() if "time/step" in row] == list(range(1, steps + 1))
    assert run.summary["outcome"] == "completed"
    assert_adds_up(run.summary["rollouts"])
    assert run.steps_saved()[-1] == steps


STORM = (
    fault("engine", "engine.logprobs", "error", probability=0.05)
    + fault("engine", "engine.generate", "error", probability=0.02)
    + fault("gateway", "gateway.reply", "error", probability=0.03)
    + fault("controller", "wire.send", "delay", only="train", probability=0.5, seconds=0.1)
    + fault("controller", "wire.send", "drop", only="run_episode", at=37)
    + fault("env-MyEnv", "wire.send", "drop", only="reply", at=53)
    + fault("engine", "wire.send", "delay", probability=0.02, seconds=0.02)
)


def test_a_storm_of_small_failures_costs_single_episodes(project: Project) -> None:
    run = project.run(steps=12, staleness=4, more=STORM)
    run.complete("--set", "loop.episode_timeout_s=5", "--set", "checkpoint.every=6")
    assert_whole(run, 12)
    failed = run.summary["rollouts"]["failed"]
    assert failed["bad_logprobs"] >= 1
    assert sum(failed.values()) < run.summary["rollouts"]["dispatched"] / 2
    assert run.summary["staleness"]["max"] <= 4


def test_workers_and_engines_that_die_are_started_again(project: Project) -> None:
    run = project.run(steps=16, staleness=4)
    with run.going("--set", "envs.0.die=9", "--set", "envs.0.seconds=0.1") as process:
        run.wait_for_step(6, process)
        engine = run.pid("engine-0")
        assert run.kill("engine-0")
        assert process.wait(timeout=200) == 0, run.output()
    assert_whole(run, 16)
    launcher = run.log("launcher-0")
    assert "env-MyEnv-0: restart 1 of" in launcher
    assert "engine-0: restart 1 of" in launcher
    assert f"engine-0 started as pid {engine}" in launcher
    assert "restart 2 of" not in launcher
    assert run.summary["staleness"]["max"] <= 4


def test_an_environment_that_blocks_its_event_loop_does_not_hang_the_run(project: Project) -> None:
    run = project.run(steps=8, staleness=4)
    run.complete("--set", "envs.0.block=9", "--set", "loop.silent_after_s=4")
    assert_whole(run, 8)
    (silent,) = run.events("role_silent")
    assert silent["role"] == "env-MyEnv"
    assert 4 <= silent["seconds"] < 30
    assert "loop.silent_after_s" in run.log("controller-0")
    assert "env-MyEnv-0 was killed by SIGKILL" in run.log("launcher-0")
    assert run.summary["rollouts"]["failed"] == {}, "what it was running is tried again"


def test_a_gateway_or_trainer_that_dies_ends_the_run_and_a_resume_repeats_nothing(
    project: Project, synchronous: Run
) -> None:
    run = project.run()
    for step, role in ((3, "trainer-0"), (5, "gateway-0")):
        with run.going("--resume", "--set", "envs.0.seconds=0.3") as process:
            run.wait_for_step(step, process)
            assert run.kill(role)
            assert process.wait(timeout=120) == 1
        said = [line for line in run.output().splitlines() if line.startswith("prl: ")]
        assert len(said) >= 1
        assert role in said[-1] and f"logs/{role}.log" in said[-1] and "SIGKILL" in said[-1]
    run.complete("--resume")
    assert run.computed() == synchronous.computed()
    assert run.weights(6) == synchronous.weights(6)


@pytest.mark.parametrize(
    ("role", "point", "at"),
    [
        # Of every checkpoint: begin, the controller's part, the manifest.
        ("controller", "checkpoint.write", 5),
        ("controller", "store.write", 25),
        ("trainer", "trainer.write", 2),
        ("trainer", "channel.send", 5),
    ],
)
def test_a_full_disk_ends_the_run_with_that_cause_and_harms_no_checkpoint(
    project: Project, synchronous: Run, role: str, point: str, at: int
) -> None:
    run = project.run()
    plain = run.config.read_text()
    run.config.write_text(plain + fault(role, point, "disk_full", at=at))
    done = run.finish()
    assert done.returncode == 1, run.told(done)
    assert_one_cause(done, run)
    for step in run.steps_saved():
        assert run.weights(step) == synchronous.weights(step) or step == 2
    run.config.write_text(plain)  # space was freed
    run.complete("--resume")
    assert run.computed() == synchronous.computed()
    assert run.weights(6) == synchronous.weights(6)


def assert_one_cause(done: subprocess.CompletedProcess[str], run: Run) -> None:
    said = [line for line in done.stderr.splitlines() if "disk is full" in line or "No space left" in line]
    assert len(said) == 1, done.stderr
    assert "logs/" in said[0]
    assert "Traceback" not in done.stderr


def test_too_many_failures_stop_the_run_loudly(project: Project) -> None:
    run = project.run(more=fault("engine", "engine.logprobs", "error", probability=0.9))
    done = run.finish("--set", "loop.failure_window=32", "--set", "eval.tasks=0")
    assert done.returncode == 1
    assert "max_failure_share" in done.stderr and "bad_logprobs" in done.stderr
    assert_adds_up(run.summary["rollouts"])
    assert run.summary["outcome"] == "failed"


def test_a_trainer_that_does_not_answer_is_named_with_its_log(project: Project) -> None:
    run = project.run(more=fault("trainer", "wire.send", "drop", only="train", at=2))
    done = run.finish("--set", "loop.step_timeout_s=5")
    assert done.returncode == 1
    assert "loop.step_timeout_s = 5 s" in done.stderr and "trainer-0.log" in done.stderr
    assert run.steps_saved() == []
    wait_until(lambda: run.alive() == [], "nothing is left")


@pytest.mark.parametrize(
    ("setting", "what", "log"),
    [
        ("envs.0.broken=true", "the data set of this environment is gone", "env-MyEnv-0.log"),
        ("model.path=empty", "empty", "-0.log"),
    ],
)
def test_a_role_that_cannot_start_ends_the_run_with_its_own_words(
    project: Project, setting: str, what: str, log: str
) -> None:
    (project.folder / "empty").mkdir()
    for path in project.model.iterdir():
        if path.suffix != ".safetensors":
            (project.folder / "empty" / path.name).write_bytes(path.read_bytes())
    run = project.run()
    done = run.finish("--set", setting)
    assert done.returncode in (1, 2), run.told(done)
    said = [line for line in done.stderr.splitlines() if line.startswith("prl: ")]
    assert len(said) == 1, done.stderr
    assert what in said[0] and log in said[0]
    assert "Traceback" not in done.stderr
    assert run.alive() == []


@pytest.mark.parametrize("moment", ["pids/controller-0", "socket"])
def test_ctrl_c_while_it_starts_ends_it_at_once(project: Project, moment: str) -> None:
    """Before the controller can catch a signal, and while it waits for the other roles."""
    run = project.run()
    with run.going() as process:
        wait_until((run.dir.control / moment).exists, "it has come so far")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 75, run.output()
    run.complete("--resume")


def test_a_second_ctrl_c_ends_it_without_waiting(project: Project) -> None:
    run = project.run(steps=1000, staleness=4, more=fault("trainer", "trainer.checkpoint", "delay", at=1, seconds=600))
    with run.going("--set", "checkpoint.every=0") as process:
        run.wait_for_step(1, process)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "stop" in run.output() or run.events("stop_requested"), "it is stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130, run.output()
    assert run.alive() == []
