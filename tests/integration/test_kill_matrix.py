"""A publish is struck in each of its states, by each kind of failure, in real runs (T12, T13, T30 with processes).

Whatever happens: the run goes on to its end, or ends with one cause; every engine that serves holds one whole version,
which the mismatch between it and the trainer shows, token by token, and so does, after it has recovered, what it
answers when it is asked; no episode is lost or counted twice; no process is left, no half of a version.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from prl import registry
from prl.engine.client import WireEngineClient
from prl.messages import EngineHealth, WeightsRef
from prl_channels.manifest import parse
from prl_channels.shelf import MANIFEST

from .harness import PATIENCE_S, Project, Run, assert_adds_up, wait_until
from .listening import listening
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
EXACT = 1e-4
"""Of one log-probability of a sequence that an engine is asked to score, between -1 and -15; 3e-6 was measured."""
ASKED = [5, 60, 7, 80, 9, 100, 11, 120, 13, 140, 15, 160]
QUICK = {("kill", "verified", "filesystem"), ("cut", "transferring", "filesystem"), ("kill", "named", "shm")}
"""A run takes 7 s and more: the others are for `make test-slow`."""
HELD = ("--set", "envs.0.hold=true")
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


def struck(project: Project, role: str, point: str, action: str, channel: str) -> tuple[Run, int]:
    """A run of three steps in which it happens once, at the third publish; nothing of it is left."""
    run = project.run(steps=STEPS, staleness=2, more=CHANNELS[channel] + fault(role, point, action, at=3))
    at_the_end = ("--set", "eval.tasks=1", "--set", "eval.every=0", "--set", "eval.at_start=false")
    with run.going("--set", "checkpoint.every=0", "--set", "loop.step_timeout_s=60", *at_the_end, *HELD) as process:
        wait_until(lambda: (project.folder / "held").exists() or process.poll() is not None, "the last evaluation")
        if process.poll() is None:
            assert_every_engine_is_whole(run, channel)
        (project.folder / "go").touch()
        code = process.wait(PATIENCE_S)
    wait_until(lambda: not run.alive(), "no process is left", 10)
    assert_adds_up(run.summary["rollouts"])
    kls = [row["mismatch/kl"] for row in run.metrics() if "mismatch/kl" in row]
    assert all(kl < SAME for kl in kls), kls
    for version in (run.dir.path / "weights").iterdir():
        if version.suffix == ".tmp":  # has no name: nobody reads it, and the next sender clears it away
            assert (role, action) == ("trainer", "kill"), version
        else:
            parse((version / MANIFEST).read_bytes(), version)
    return run, code


def assert_every_engine_is_whole(run: Run, channel: str) -> None:
    """Each says that it holds the last version, and scores a sequence as the weights do that were published as it."""
    receiver = registry.build("channels", channel, {}).receiver()
    location = run.dir.path / "weights" / f"v_{STEPS:06d}"
    received = receiver.receive(WeightsRef(STEPS, 0, str(location)))
    model = LlamaForCausalLM.from_pretrained(run.project.model)
    lacking, unknown = model.load_state_dict(dict(received.tensors), strict=False)
    assert set(lacking) <= {"lm_head.weight"} and not unknown, (lacking, unknown)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ASKED])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ASKED[1:])[:, None])[:, 0]
    engines = [path.name for path in (run.dir.control / "pids").glob("engine-*")]
    assert engines == ["engine-0"]
    for engine in engines:
        health, scores = asyncio.run(asked(run, engine))
        assert (health.version, health.incarnation) == (STEPS, 0), health
        torch.testing.assert_close(torch.tensor(scores[1:]), expected, atol=EXACT, rtol=0)


async def asked(run: Run, engine: str) -> tuple[EngineHealth, list[float]]:
    """Its health, and its log-probabilities of `ASKED`."""
    ((host, port),) = listening(run.pid(engine))
    client = WireEngineClient(f"tcp://{host}:{port}", run.dir.token.read_text())
    try:
        async with asyncio.timeout(60):
            (scores,) = await client.score([ASKED])
            return await client.health(), scores
    finally:
        await client.close()


@pytest.mark.parametrize(("action", "state", "channel"), matrix(("kill", "cut", "error"), STATES))
def test_the_engine_s_side(project: Project, action: str, state: str, channel: str) -> None:
    """It dies, or its connections do, or it fails: the run ends well."""
    run, code = struck(project, "engine", STATES[state], action, channel)
    assert code == 0, run.output()
    assert f"fault injection: {action} at {STATES[state]}" in run.log("engine-0") or action == "kill"
    assert [row["step"] for row in run.metrics() if "time/step" in row] == list(range(1, STEPS + 1))
    assert run.summary["outcome"] == "completed"
    assert ("engine-0: restart 1 of" in run.log("launcher-0")) == (action == "kill")
    assert [row["version"] for row in run.events("weights_installed")][-1] == STEPS


@pytest.mark.parametrize(("action", "state", "channel"), matrix(("kill", "disk_full"), SENDING))
def test_the_trainer_s_side(project: Project, action: str, state: str, channel: str) -> None:
    """It dies, or has no room: the run ends with that cause, and its engines hold a whole version until then."""
    run, code = struck(project, "trainer", SENDING[state], action, channel)
    assert code == 1, run.output()
    assert run.summary["outcome"] == "failed"
    said = run.output()
    if action == "kill":
        assert "trainer-0" in said and "SIGKILL" in said, said
    else:
        assert "No space left on device" in run.summary["reason"], run.summary["reason"]
