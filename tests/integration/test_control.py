"""A run that is going on: what may be asked of it, by whom, and how it is ended and continued."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from prl.messages import CONTROL
from prl.types import SCHEMA_VERSION
from prl.wire import CALL, Envelope

from .harness import SECRET, Project, Run, assert_adds_up, wait_until
from .listening import listening

LONG = 100_000
ENDLESS = (
    "--set",
    "checkpoint.every=0",
    "--set",
    "eval.every=0",
    "--set",
    "trainer.lr=1e-6",
    "--set",
    "envs.0.seconds=0.02",
)
"""It learns so little that its rewards never become all the same, which would end it."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Run, subprocess.Popen[str]]]:
    """A run that does not end by itself. The tests below use it in their order; the last one ends it."""
    run = Project(tmp_path_factory.mktemp("live"), tiny_model).run(
        steps=LONG, staleness=4, more="[store]\nrollouts = 'none'\n"
    )
    with run.going(*ENDLESS) as process:
        run.wait_for_step(2, process)
        yield run, process


Live = tuple[Run, subprocess.Popen[str]]


def test_the_token_is_private_and_the_only_secret(live: Live) -> None:
    run, _ = live
    assert stat.S_IMODE(run.dir.token.stat().st_mode) == 0o600
    token = run.dir.token.read_text().strip()
    holders = [path for path in run.dir.path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert holders == [run.dir.token]
    for pid in run.alive():
        assert token.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert token.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_an_environment_sees_no_secret_of_the_shell(live: Live) -> None:
    run, _ = live
    secret = f"{SECRET}=x".encode()
    sees = {role: secret in environ(run.pid(role)) for role in ("controller-0", "env-MyEnv-0")}
    assert sees == {"controller-0": True, "env-MyEnv-0": False}


def environ(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_every_process_listens_on_loopback_only(live: Live) -> None:
    run, _ = live
    addresses = {address for pid in run.alive() for address, _ in listening(pid)}
    assert addresses == {"127.0.0.1"}


def test_who_does_not_know_the_token_gets_no_answer(live: Live) -> None:
    run, process = live
    token = run.dir.token.read_bytes().strip()
    ports = {port for pid in run.alive() for _, port in listening(pid)}
    assert len(ports) >= 3, "controller, gateway and engine listen"
    wrong = ([b"", message("stop")], [b"0" * 64, message("stop")], [message("stop")], [b"\x80\x04\x95pickle"])
    with zmq.Context() as context:
        for port in ports:
            strangers = [send(context, port, frames) for frames in wrong]
            friend = send(context, port, [token, message("why-stuck")])
            assert friend.poll(30_000), "with the token the same message is answered, be it by 'no such method'"
            assert [stranger.poll(100) for stranger in strangers] == [0] * len(wrong)
            for socket in (*strangers, friend):
                socket.close(linger=0)
    run.wait_for_step(run.trained_steps() + 2, process)


def send(context: zmq.Context[zmq.Socket[bytes]], port: int, frames: list[bytes]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart(frames)
    return socket


def message(action: str) -> bytes:
    """A call to the control socket as it travels."""
    payload = msgspec.msgpack.encode({"action": action})
    return msgspec.msgpack.encode([Envelope(SCHEMA_VERSION, CALL, 1, CONTROL.name, payload)])


def test_why_stuck_names_who_waits_for_whom(live: Live) -> None:
    run, _ = live
    answer = json.loads(run.ask("why-stuck", "--json").stdout)
    assert answer["ok"]
    assert set(answer["data"]["roles"]) == {"engine-0", "trainer-0", "gateway-0", "env-MyEnv-0"}
    assert any(" waits for " in line for line in answer["data"]["waits"])


def test_pause_holds_still_and_resume_goes_on(live: Live) -> None:
    run, process = live
    assert run.ask("pause").returncode == 0
    wait_until(lambda: run.status.get("paused"), "the status says so")
    settled = steady(run)
    assert "the run is paused" in run.ask("why-stuck").stdout
    assert run.trained_steps() == settled
    assert run.ask("resume").returncode == 0
    run.wait_for_step(settled + 2, process)
    wait_until(lambda: not run.status.get("paused"), "the status, twice a second, says so")


def steady(run: Run) -> int:
    """The number of steps once it does not change for a second."""
    steps, since = run.trained_steps(), time.monotonic()
    while time.monotonic() - since < 1:
        time.sleep(0.05)
        if run.trained_steps() != steps:
            steps, since = run.trained_steps(), time.monotonic()
    return steps


def test_a_checkpoint_may_be_asked_for(live: Live) -> None:
    run, process = live
    answer = json.loads(run.ask("checkpoint", "--json").stdout)
    assert answer["ok"]
    assert run.steps_saved() == [answer["data"]["step"]]
    run.wait_for_step(answer["data"]["step"] + 1, process)


def test_a_second_start_of_the_same_run_is_refused(live: Live) -> None:
    run, process = live
    for arguments in ((), ("--resume",), ("--clean", "--yes")):
        done = run.finish(*arguments)
        assert done.returncode == 2, done.stderr
        assert "going on" in done.stderr
    run.wait_for_step(run.trained_steps() + 1, process)


def test_stop_saves_and_ends_well(live: Live) -> None:
    run, process = live
    assert run.ask("stop").returncode == 0
    assert process.wait(timeout=120) == 0, run.output()
    assert run.summary["outcome"] == "stopped"
    assert run.summary["steps"] == run.steps_saved()[-1] == run.trained_steps()
    assert_adds_up(run.summary["rollouts"])
    assert run.alive() == []
    done = run.ask("pause")
    assert done.returncode == 1
    assert "not running" in done.stderr


def test_ctrl_c_saves_ends_with_75_and_resume_continues_it(live: Live) -> None:
    run, _ = live
    saved = run.steps_saved()[-1]
    with run.going("--resume", *ENDLESS) as process:
        run.wait_for_step(saved + 3, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 75, run.output()
    assert run.steps_saved()[-1] == run.trained_steps() >= saved + 3
    steps = [row["step"] for row in run.metrics() if "time/step" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert_adds_up(run.summary["rollouts"])
    assert run.summary["staleness"]["max"] <= 4
    assert "--resume" in run.output()
