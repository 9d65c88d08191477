"""What an engine's heartbeats say that it is doing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from prl.engine.server import EngineServer


class Backend:
    """As much of one as is asked for here."""

    version, busy = 3, 1.5

    def __init__(self, load: int, info: dict[str, Any]) -> None:
        self.load = load
        self._info = info

    def start(self, deliver: Any) -> None: ...
    def info(self) -> dict[str, Any]:
        return self._info

    def gauges(self) -> dict[str, float]:
        return {"swap_stall_s": 0.25}


def reported(backend: Any) -> Any:
    async def main() -> Any:
        process = SimpleNamespace()
        report = asyncio.create_task(EngineServer(backend).report(process))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        report.cancel()
        return process

    return asyncio.run(main())


def test_it_says_how_many_requests_it_has() -> None:
    assert reported(Backend(0, {})).doing == "waiting for requests"
    process = reported(Backend(7, {}))
    assert process.doing == "generating 7 requests" and process.busy == 1.5
    assert process.gauges == {"version": 3.0, "load": 7.0, "swap_stall_s": 0.25}


def test_it_says_how_far_an_install_is() -> None:
    phrase = "installing version 4: transferring for 2.0 of 150 s"
    assert reported(Backend(7, {"installing": phrase})).doing == phrase
