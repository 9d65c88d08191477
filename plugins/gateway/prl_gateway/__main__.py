"""`python -m prl_gateway RUN_DIR [REPLICA]`: the gateway of a run."""

from __future__ import annotations

import asyncio
import sys

from prl import role
from prl.protocols import EnginePlugin
from prl.wire import Server
from prl_gateway import library, template
from prl_gateway.service import Gateway


async def serve(process: role.RoleProcess) -> None:
    """Load the tokenizer, serve environment workers, register, and sweep once a second until told to stop."""
    config = process.config
    tokenizer = template.load(config.model.path)
    plugin: EnginePlugin = config.engine.build()
    gateway = Gateway(
        process.token,
        library.choose(tokenizer, config.model.path),
        lambda address: plugin.connect(address, process.token),
        context=tokenizer.context,
    )
    server = Server(process.token, gateway.worker_handlers())
    address = server.start()
    try:
        await process.register(gateway.controller_handlers(), address=address)
        sweep = asyncio.create_task(_sweep(process, gateway))
        await process.until_stopped()
        sweep.cancel()
    finally:
        await gateway.close()
        server.close()


async def _sweep(process: role.RoleProcess, gateway: Gateway) -> None:
    while True:
        gateway.expire()
        gauges = gateway.gauges()
        process.gauges = gauges
        process.doing = f"{gauges['in_flight']:.0f} turns in flight, {gauges['episodes']:.0f} episodes held"
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    role.main("gateway", serve, sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
