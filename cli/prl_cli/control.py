"""One request to the controller of a run, over its control socket."""

from __future__ import annotations

import asyncio
import socket
import time

from prl.errors import PrlError, WireError
from prl.messages import CONTROL, Action, ControlReply, ControlRequest
from prl.rundir import RunDir
from prl.wire import Client
from prl_cli import output, runs


class NotRunning(PrlError):
    """There is no controller to ask; the message tells how the run ended."""


def request(run: RunDir, action: Action, *, timeout: float, engines: int = 0) -> ControlReply:
    """Ask the controller for `action`; wait for its answer at most `timeout` seconds. `engines` goes with "scale".

    Raises:
        NotRunning: the run has ended, or was killed.
        WireError: its controller does not answer.
    """
    try:
        address = run.socket.read_text(encoding="utf-8").strip()
        token = run.token.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise not_running(run) from None
    if not _listens(address):
        raise not_running(run)
    return asyncio.run(_call(address, token, ControlRequest(action, engines), timeout))


def not_running(run: RunDir) -> NotRunning:
    """What became of a run that cannot be asked any more."""
    if runs.is_alive(run):
        return NotRunning(
            f"run {run.name!r} is starting or ending: its controller does not listen; try again in a moment"
        )
    last = runs.status(run)
    if not last:
        return NotRunning(f"run {run.name!r} is not running and never got as far as a status; see {run.logs}/")
    when = output.ago(time.time() - run.status.stat().st_mtime)
    text = f"run {run.name!r} is not running: {last.get('state', 'ended')}"
    text += "" if last.get("kind") == "serve" else f" at step {last.get('step', 0)} of {last.get('steps', '?')}"
    text += f", {when}"
    if last.get("failed_reason"):
        text += f": {last['failed_reason']}"
    if last.get("log"):
        text += f"; see {run.path / last['log']}"
    return NotRunning(text)


def _listens(address: str) -> bool:
    """Whether anything accepts connections there. ZeroMQ itself would wait for it without end."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


async def _call(address: str, token: str, request: ControlRequest, timeout: float) -> ControlReply:
    client = Client(address, token, name="the controller")
    try:
        return await client.call(CONTROL, request, timeout=timeout)
    except WireError as error:
        raise WireError(f"{error}; `prl doctor` and the controller's log may tell why") from error
    finally:
        client.close()
