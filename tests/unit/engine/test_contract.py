"""The embedded engine, behind its wire and with the filesystem channel, keeps the contract of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from prl import registry
from prl.engine.client import WireEngineClient
from prl.engine.server import EngineServer
from prl.protocols import EngineClient
from prl.testing.contracts import engine
from prl.wire import Server
from prl_engine_embedded.backend import EmbeddedBackend
from prl_engine_embedded.fixed import FixedScheduler


@pytest.mark.parametrize("check", engine.CLIENT_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[EngineClient], Awaitable[None]], kit: Any) -> None:
    async def main() -> None:
        loaded = kit.load()
        receiver = registry.build("channels", "filesystem", {"visibility_s": 0.05}).receiver()
        backend = EmbeddedBackend(loaded, kit.track(FixedScheduler(loaded, 16, 8)), receiver)
        server = Server("t", EngineServer(backend).handlers())
        client = WireEngineClient(server.start(), "t")
        try:
            await check(client)
        finally:
            await client.close()
            server.close()

    asyncio.run(main())
