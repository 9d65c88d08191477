"""stop, pause, resume, checkpoint and why-stuck against a controller of our own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prl.messages import CONTROL, ControlReply, ControlRequest
from prl.rundir import RunDir
from prl.wire import Server

TOKEN = "secret"


@pytest.fixture
def run(project: Path) -> RunDir:
    run = RunDir(project / "runs" / "first")
    run.control.mkdir(parents=True)
    run.config.write_text("{}")
    run.token.write_text(TOKEN)
    return run


class Controller:
    """Answers on the control socket from a thread; `asked` is what it was asked."""

    def __init__(self, run: RunDir, reply: ControlReply, token: str = TOKEN) -> None:
        self.asked: list[str] = []
        self._run, self._reply, self._token = run, reply, token
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        self._server.close()
        self._loop.close()

    async def _open(self) -> Server:
        server = Server(self._token, {CONTROL: self._answer})
        self._run.socket.write_text(server.start())
        return server

    def _answer(self, peer: object, request: ControlRequest) -> ControlReply:
        self.asked.append(request.action)
        self.engines = request.engines
        return self._reply

    def __enter__(self) -> Controller:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@contextmanager
def controller(run: RunDir, reply: ControlReply, token: str = TOKEN) -> Iterator[Controller]:
    with Controller(run, reply, token) as answering:
        yield answering


@pytest.mark.parametrize("action", ["stop", "pause", "resume", "checkpoint", "why-stuck"])
def test_each_command_asks_for_its_action(run: RunDir, prl: Any, action: str) -> None:
    with controller(run, ControlReply(True, "as you wish")) as answering:
        result = prl(action, "first")
    assert (result.exit_code, result.stdout) == (0, "as you wish\n")
    assert answering.asked == [action]


def test_scale_sends_the_number(run: RunDir, prl: Any) -> None:
    with controller(run, ControlReply(True, "engines: 1 -> 3", {"wanted": 3})) as answering:
        result = prl("scale", "first", "engines=3", "--json")
    assert (result.exit_code, json.loads(result.stdout)["data"]) == (0, {"wanted": 3})
    assert answering.asked == ["scale"] and answering.engines == 3


@pytest.mark.parametrize(
    "target", ["engines=0", "engines=-1", "engines=1" + 30 * "0", "engines", "engines=many", "trainers=2", "3"]
)
def test_scale_refuses_what_is_no_number_of_engines(run: RunDir, prl: Any, target: str) -> None:
    result = prl("scale", "first", target)
    assert result.exit_code == 2
    assert "engines=N" in result.stderr


def test_a_run_can_be_named_by_its_folder(run: RunDir, prl: Any) -> None:
    with controller(run, ControlReply(True)) as answering:
        assert prl("pause", run.path).exit_code == 0
    assert answering.asked == ["pause"]


def test_why_stuck_prints_every_wait(run: RunDir, prl: Any) -> None:
    waits = ["train waits for batch: 12 of 32 groups (for 3.0 s)", "batch waits for engine: rollouts (for 9.0 s)"]
    with controller(run, ControlReply(True, "\n".join(waits), {"waits": waits, "roles": {}})):
        result = prl("why-stuck", "first")
    assert result.stdout.splitlines() == waits


def test_json_is_one_object(run: RunDir, prl: Any) -> None:
    with controller(run, ControlReply(True, "paused", {"step": 4})):
        answer = json.loads(prl("pause", "first", "--json").stdout)
    assert answer["ok"] is True
    assert (answer["action"], answer["message"], answer["data"]) == ("pause", "paused", {"step": 4})


def test_a_refusal_fails(run: RunDir, prl: Any) -> None:
    with controller(run, ControlReply(False, "already paused")):
        result = prl("pause", "first")
    assert result.exit_code == 1
    assert "already paused" in result.stderr


def test_a_run_that_has_ended_tells_how(run: RunDir, prl: Any) -> None:
    run.socket.write_text("tcp://127.0.0.1:1")  # nobody listens there
    run.status.write_text(json.dumps({"state": "failed", "step": 7, "steps": 50, "failed_reason": "engine-0 died"}))
    result = prl("stop", "first")
    assert result.exit_code == 1
    assert "is not running: failed at step 7 of 50" in result.stderr
    assert "engine-0 died" in result.stderr
    answer = json.loads(prl("stop", "first", "--json").stdout)
    assert (answer["ok"], answer["status"]["step"]) == (False, 7)


def test_a_run_that_was_killed_is_called_dead(run: RunDir, prl: Any) -> None:
    run.status.write_text(json.dumps({"state": "running", "step": 7, "steps": 50}))
    assert "is not running: dead at step 7 of 50" in prl("why-stuck", "first").stderr


def test_a_wrong_token_is_refused(run: RunDir, prl: Any) -> None:
    with controller(run, ControlReply(True), token="another") as answering:
        result = prl("stop", "first", "--timeout", "0.5")
    assert result.exit_code == 1
    assert answering.asked == []


def test_an_unknown_run_names_the_nearest(run: RunDir, prl: Any) -> None:
    result = prl("stop", "frist")
    assert result.exit_code == 2
    assert "did you mean 'first'?" in result.stderr
