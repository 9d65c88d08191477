"""A publish is struck in each of its states, by each kind of failure, in real runs (T12, T13, T30 with processes).

Whatever happens: the run goes on to its end, or ends with one cause; every engine that serves holds one whole version,
which the mismatch between it and the trainer shows, token by token; no episode is lost or counted twice; no process is
left, no half of a version.
"""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from prl_channels.manifest import parse
from prl_channels.shelf import MANIFEST

from .harness import Project, Run, assert_adds_up, wait_until
from .test_faults import fault

STEPS = 3
"""Versions 0 to 3. What happens at the third install happens once: an engine that is started again has two left."""
STATES = {
    "announced": "engine.announced",
    "transferring": "channel.receive",
    "installed": "engine.install",
    "verified": "engine.verified",
    "acknowledged": "engine.acknowledged",
}
SENDING = {
    "announced": "trainer.publish",
    "transferring": "channel.segment",
    "sent": "channel.send",
    "named": "channel.commit",
}
SAME = 1e-6
"""Mismatch KL of a float32 step: far below what a torn tensor makes."""
QUICK = {("kill", "verified", "filesystem"), ("cut", "transferring", "filesystem"), ("kill", "named", "shm")}
"""A run takes 7 s and more: the others are for `make test-slow`."""
CHANNELS = {"filesystem": "", "shm": '[channel]\nuse = "shm"\nencoding = "delta"\n'}


def matrix(actions: tuple[str, ...], states: dict[str, str]) -> list[Any]:
    cells = []
    for action in actions:
        for state in states:
            for channel in CHANNELS:
                marks = () if (action, state, channel) in QUICK else (pytest.mark.slow,)
                name = f"{action}-{state}-{channel}"
                cells.append(pytest.param(action, state, channel, id=name, marks=marks))
    return cells


def struck(
    project: Project, role: str, point: str, action: str, channel: str
) -> tuple[Run, subprocess.CompletedProcess[str]]:
    """A run of three steps in which it happens once, at the third publish; nothing of it is left."""
    run = project.run(steps=STEPS, staleness=2, more=CHANNELS[channel] + fault(role, point, action, at=3))
    done = run.finish("--set", "checkpoint.every=0", "--set", "eval.tasks=0", "--set", "loop.step_timeout_s=60")
    wait_until(lambda: not run.alive(), "no process is left", 10)
    assert_adds_up(run.summary["rollouts"])
    kls = [row["mismatch/kl"] for row in run.metrics() if "mismatch/kl" in row]
    assert all(kl < SAME for kl in kls), kls
    for version in (run.dir.path / "weights").iterdir():
        if version.suffix == ".tmp":  # has no name: nobody reads it, and the next sender clears it away
            assert (role, action) == ("trainer", "kill"), version
        else:
            parse((version / MANIFEST).read_bytes(), version)
    return run, done


@pytest.mark.parametrize(("action", "state", "channel"), matrix(("kill", "cut", "error"), STATES))
def test_the_engine_s_side(project: Project, action: str, state: str, channel: str) -> None:
    """It dies, or its connections do, or it fails: the run ends well."""
    run, done = struck(project, "engine", STATES[state], action, channel)
    assert done.returncode == 0, run.told(done)
    assert f"fault injection: {action} at {STATES[state]}" in run.log("engine-0") or action == "kill"
    assert [row["step"] for row in run.metrics() if "time/step" in row] == list(range(1, STEPS + 1))
    assert run.summary["outcome"] == "completed"
    assert ("engine-0: restart 1 of" in run.log("launcher-0")) == (action == "kill")
    assert [row["version"] for row in run.events("weights_installed")][-1] == STEPS


@pytest.mark.parametrize(("action", "state", "channel"), matrix(("kill", "disk_full"), SENDING))
def test_the_trainer_s_side(project: Project, action: str, state: str, channel: str) -> None:
    """It dies, or has no room: the run ends with that cause, and its engines hold a whole version until then."""
    run, done = struck(project, "trainer", SENDING[state], action, channel)
    assert done.returncode == 1, run.told(done)
    assert run.summary["outcome"] == "failed"
    said = done.stdout + done.stderr
    if action == "kill":
        assert "trainer-0" in said and "SIGKILL" in said, said
    else:
        assert "No space left on device" in run.summary["reason"], run.summary["reason"]
