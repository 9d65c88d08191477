"""`python -m prl.envworker RUN_DIR LABEL REPLICA`: build the environment, register, serve until the run is over."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from prl import role
from prl.config.schema import EnvTable, RunConfig
from prl.envworker.worker import Worker
from prl.errors import UsageError
from prl.planning import ENV_PREFIX, env_role


def env_table(config: RunConfig, label: str) -> EnvTable:
    for table in config.envs:
        if table.label == label:
            return table
    raise UsageError(f"no environment is called {label!r}; the run has {[table.label for table in config.envs]}")


async def serve(process: role.RoleProcess) -> None:
    label = process.name.removeprefix(ENV_PREFIX)
    env = env_table(process.config, label).build()
    worker = Worker(label, env, process.token)
    await process.register(worker.handlers, info={"env": label, "class": type(env).__name__})
    report = asyncio.create_task(_report(process, worker))
    try:
        await process.until_stopped()
    finally:
        report.cancel()
        await worker.close()


async def _report(process: role.RoleProcess, worker: Worker) -> None:
    """Keep the next heartbeat's figures current."""
    while True:
        process.busy = time.process_time()
        process.doing = f"{worker.in_flight} episodes in flight, {worker.finished} finished"
        process.gauges = {
            "in_flight": worker.in_flight,
            "finished": worker.finished,
            "errors": worker.errors,
        }
        await asyncio.sleep(0.5)


def main(argv: list[str]) -> None:
    if len(argv) != 3 or not argv[2].isdigit():
        raise SystemExit("usage: python -m prl.envworker RUN_DIR LABEL REPLICA")
    # An environment's print() must not reach whoever reads our standard output.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    role.main(env_role(argv[1]), serve, argv[0], int(argv[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
