"""`python -m prl_engine_vllm RUN_DIR REPLICA`, under the interpreter that has vLLM: one engine of a run."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from prl import role
from prl.config.schema import RunConfig
from prl.engine.server import EngineServer
from prl.errors import ConfigError, EnvironmentNotFit, RunFailed, WireError
from prl.wire import Server
from prl_engine_vllm import arguments, http, leftovers, settings
from prl_engine_vllm.adapters import Adapters
from prl_engine_vllm.backend import VllmBackend
from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.generation import Generation
from prl_engine_vllm.install import Installer
from prl_engine_vllm.lastwords import last_words, may_pass
from prl_engine_vllm.worker import Setup

log = logging.getLogger(__name__)

GARBAGE = (50_000, 20, 100)
"""Thresholds of Python's collector. Tokens come as objects that are in no cycle: only their number sets it off."""
WARM_UP = [[1, 2, 3, 4]]
"""Scored once before the engine registers: the first request took 6 to 12 s on a CPU."""


async def serve(process: role.RoleProcess) -> None:
    """Build vLLM's engine, serve, register, and report until told to stop or until the engine core has died."""
    config = process.config
    own = cast(VllmConfig, config.engine.plugin_config())
    settings.apply(own)
    shared = process.run_dir.path / "engine" / f"shared-{os.getpid()}"
    leftovers.outlive_the_group(shared)
    deadline = Deadline(own.startup_timeout_s, process.run_dir.logs / f"engine-{process.replica}.log")
    namespace = arguments.require(arguments.complete(config, own, process.replica))
    sock, url = http.bind(own.api_host, namespace.port)
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def die(why: str) -> None:
        if not ended.done():
            ended.set_result(why)

    llm = build(namespace, deadline)
    leftovers.note_what_vllm_made(shared)
    for name in ("prl", "prl_engine_vllm", "prl_channels"):
        logging.getLogger(name).setLevel(logging.INFO)  # what vLLM imports has raised the level of all
    generation = Generation(llm, await llm.get_supported_tasks(), recompute=own.swap_kv == "recompute", on_dead=die)
    try:
        await generation.score(WARM_UP)
    except WireError as error:
        raise _cannot_start(deadline, error) from error
    installer = build_installer(llm, generation, config, own, process.run_dir.path, process.replica)
    engine = EngineServer(VllmBackend(generation, installer, about(llm, url)))
    serving = http.Serving(await http.application(llm, namespace, process.token), sock)
    server = Server(process.token, engine.handlers())
    address = server.start()
    deadline.met()
    collect_garbage_rarely()
    tasks: list[asyncio.Task[Any]] = []
    try:
        process.gauges = engine.gauges()  # in its first heartbeat: admission goes by the size of the cache
        welcome = await process.register({}, address=address, info=about(llm, url))
        installer.incarnation = generation.incarnation = welcome.incarnation
        log.info("serving; over HTTP at %s with the run's token as the key", url)
        tasks = [
            asyncio.create_task(engine.report(process)),
            asyncio.create_task(watch(generation, own.stall_timeout_s, die)),
            asyncio.create_task(process.until_stopped()),
        ]
        await asyncio.wait([ended, tasks[-1]], return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not tasks[-1].done():
            raise RunFailed(f"{ended.result()}. {last_words(deadline.log)}".rstrip(". "))
    finally:
        for task in tasks:
            task.cancel()
        await serving.close()
        server.close()
        engine.close()
        llm.shutdown(timeout=0)


def build(namespace: Any, deadline: Deadline) -> Any:
    """vLLM's engine; its processes are started and the model is loaded. It blocks the event loop for that long.

    Raises:
        ConfigError: vLLM refuses the model or the arguments. EnvironmentNotFit: it cannot be built, with what vLLM said
            last. RunFailed: another attempt may succeed.
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    former = signal.signal(signal.SIGTERM, _stopped_at_once)
    try:
        return AsyncLLM.from_vllm_config(
            arguments.engine_config(namespace),
            usage_context=UsageContext.ENGINE_CONTEXT,
            enable_log_requests=namespace.enable_log_requests,
        )
    except arguments.Refused as error:
        raise ConfigError([f"vLLM refuses it: {error}"]) from error
    except Exception as error:
        raise _cannot_start(deadline, error) from error
    finally:
        signal.signal(signal.SIGTERM, former)


def _cannot_start(deadline: Deadline, error: Exception) -> EnvironmentNotFit | RunFailed:
    """The exit code says whether starting it again makes sense."""
    said = last_words(deadline.log) or f"{type(error).__name__}: {error}"
    return (RunFailed if may_pass(said) else EnvironmentNotFit)(f"vLLM cannot start: {said}")


def build_installer(
    llm: Any, gate: Generation, config: RunConfig, own: VllmConfig, run_dir: Path, replica: int
) -> Installer:
    """What brings new weights."""
    channel = config.channel
    setup = Setup(channel.use, channel.own, list(config.faults), replica, config.seed)
    room = Adapters(llm, run_dir / "engine" / f"adapters-{replica}") if llm.vllm_config.lora_config else None
    return Installer(llm, gate, setup, timeout_s=config.engine.install_timeout_s, adapters=room)


def collect_garbage_rarely() -> None:
    """Leave out what is there by now, vLLM's and torch's modules, and look at the rest less often. With Python's own
    settings every token cost 39 us of this process at 512 requests, and a step up to 0.8 s: more than one core at
    31,000 tokens/s. With these it is 13 us, and 0.04 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)


def about(llm: Any, url: str) -> dict[str, Any]:
    """For status.json and for health."""
    import vllm

    config = llm.vllm_config
    return {
        "vllm": vllm.__version__,
        "api": f"{url}/v1",
        "model": _first(config.model_config.served_model_name),
        "device": str(config.device_config.device_type),
        "max_model_len": config.model_config.max_model_len,
    }


def _first(names: str | list[str]) -> str:
    return names if isinstance(names, str) else names[0]


async def watch(generation: Generation, limit_s: float, die: Any) -> None:
    """End an engine that has work and does nothing: a scheduler or a kernel that hangs says nothing by itself."""
    while True:
        await asyncio.sleep(min(1.0, limit_s / 4))
        idle = generation.load == 0 or generation.paused
        if idle:
            generation.gauges.moved = time.monotonic()
        elif time.monotonic() - generation.gauges.moved > limit_s:
            die(f"{generation.load} requests are in flight and none got a token for {limit_s:g} s (stall_timeout_s)")
            return


class Deadline:
    """Ends the process when the engine is not ready in time. A thread, since building blocks the event loop."""

    def __init__(self, limit_s: float, log: Path) -> None:
        self.log = log
        self._limit_s = limit_s
        self._met = threading.Event()
        threading.Thread(target=self._wait, name="startup-deadline", daemon=True).start()

    def met(self) -> None:
        self._met.set()

    def _wait(self) -> None:
        if not self._met.wait(self._limit_s):
            said = last_words(self.log)
            log.error("vLLM was not ready after %g s (startup_timeout_s)%s", self._limit_s, f": {said}" if said else "")
            _end(1)


def _stopped_at_once(*_: object) -> None:
    log.info("told to stop while vLLM was starting")
    _end(0)


def _end(code: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    role.main("engine", serve, sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
