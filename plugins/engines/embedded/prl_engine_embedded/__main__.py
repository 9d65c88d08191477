"""`python -m prl_engine_embedded RUN_DIR [REPLICA]`: one engine of a run."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from typing import cast

from prl import role
from prl.engine.server import EngineServer
from prl.wire import Server
from prl_engine_embedded.backend import EmbeddedBackend
from prl_engine_embedded.build import build_receiver, build_scheduler
from prl_engine_embedded.config import EmbeddedConfig


def _end_process(args: threading.ExceptHookArgs) -> None:
    """A scheduler whose thread died would leave every request waiting: better no engine than a silent one."""
    logging.getLogger(__name__).critical("a thread of the engine died", exc_info=args.exc_value)
    sys.stderr.flush()
    os._exit(1)


async def serve(process: role.RoleProcess) -> None:
    """Load, serve, register, and report once a second until told to stop."""
    threading.excepthook = _end_process
    own = cast(EmbeddedConfig, process.config.engine.plugin_config())
    model, scheduler = await asyncio.to_thread(build_scheduler, process.config, own)
    recompute = own.swap_kv == "recompute"
    backend = EmbeddedBackend(model, scheduler, build_receiver(process.config), recompute=recompute)
    engine = EngineServer(backend)
    server = Server(process.token, engine.handlers())
    address = server.start()
    try:
        welcome = await process.register({}, address=address, info={"device": str(model.device)})
        backend.incarnation = welcome.incarnation
        report = asyncio.create_task(engine.report(process))
        await process.until_stopped()
        report.cancel()
    finally:
        server.close()
        engine.close()


if __name__ == "__main__":
    role.main("engine", serve, sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
