"""Drives one real vLLM engine through a list of steps. It runs under vLLM's interpreter and knows no pytest.

    python vllm_driver.py REQUEST.json ANSWER.json

The request has `arguments` (of vLLM), `channel` and `steps`, each a method of `Driver` and its keywords; the
answer has what each returned.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prl.engine.backend import Key, Result
from prl.errors import PrlError
from prl.messages import GenerateRequest, WeightsRef
from prl.types import Sampling
from prl_engine_vllm.adapters import Adapters
from prl_engine_vllm.arguments import fitted
from prl_engine_vllm.generation import Generation
from prl_engine_vllm.install import Installer
from prl_engine_vllm.worker import Setup

STEP_LIMIT_S = 120.0


class Driver:
    def __init__(
        self, llm: Any, tasks: Any, request: dict[str, Any], folder: Path, died: Callable[[str], None]
    ) -> None:
        self.llm = llm
        self.ended: list[str] = []
        self.generation = Generation(llm, tasks, recompute=True, on_dead=died)
        self.generation.start(self._deliver)
        self.installer = Installer(
            llm,
            self.generation,
            Setup(*request["channel"]),
            timeout_s=60.0,
            adapters=Adapters(llm, folder / "adapters"),
            end=self.ended.append,
        )
        self._numbers = itertools.count(1)
        self._running: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def install(self, ref: dict[str, Any]) -> dict[str, Any]:
        """What went wrong, if anything did, and what is held then."""
        error = ""
        try:
            await self.installer.install(WeightsRef(**ref))
        except PrlError as raised:
            error = str(raised)
        return {"error": error, "version": self.installer.version, "ended": self.ended, **self.installer.info()}

    async def score(self, sequences: list[list[int]], rank: int | None = None) -> list[list[float]]:
        return await self.generation.score(sequences, rank=rank)

    async def placed(self) -> list[int]:
        """How many requests in flight each data-parallel rank has."""
        core = self.llm.engine_core
        return [list(core.reqs_in_flight.values()).count(engine) for engine in core.core_engines]

    async def gauges(self) -> dict[str, float]:
        return self.generation.gauges.values()

    async def spoil(self, rank: int) -> None:
        """The next weights come wrong to one data-parallel rank."""
        core = self.llm.engine_core
        engine = core.core_engines[rank]
        await core._call_utility_async("collective_rpc", "prl_spoil_once", None, (), {}, engine=engine)

    async def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Begin answers and do not wait for them."""
        requests: list[tuple[Key, GenerateRequest]] = []
        for prompt in prompts:
            number = next(self._numbers)
            name = f"r{number}"
            self._running[name] = asyncio.get_running_loop().create_future()
            request = GenerateRequest(name, prompt, Sampling(max_tokens, 1.0), [], number, 60.0)
            requests.append(((self, name), request))
        self.generation.add(requests)

    async def until(self, tokens: int) -> None:
        """Every answer that was begun has so many tokens."""
        while min(len(flight.tokens) for flight in self.generation._by_key.values()) < tokens:
            await asyncio.sleep(0.005)

    async def finish(self) -> list[dict[str, Any]]:
        """All answers that were begun, in that order."""
        found = list(await asyncio.gather(*self._running.values()))
        self._running.clear()
        return found

    async def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        await self.start(prompts, max_tokens)
        return await self.finish()

    async def swap_kv(self, mode: str) -> None:
        self.generation._recompute = mode == "recompute"

    async def plain_once(self) -> None:
        await self.llm.collective_rpc("prl_plain_once")

    async def adapters(self) -> list[int]:
        """The numbers of those that vLLM has loaded."""
        return sorted(await self.llm.list_loras())

    async def cache(self) -> dict[str, Any]:
        config = self.llm.vllm_config.cache_config
        return {"prefixes": config.enable_prefix_caching, "block": config.block_size}

    def _deliver(self, results: list[Result]) -> None:
        for result in results:
            made, failure = result.generation, result.failure
            if made is not None:
                found = {"tokens": made.token_ids, "logprobs": made.logprobs, "versions": made.versions}
            else:
                assert failure is not None
                found = {"error": failure.message, "retryable": failure.retryable}
            self._running[result.key[1]].set_result(found)


async def main(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    started = time.monotonic()
    given = fitted({**request["arguments"], "worker_extension_cls": "vllm_extension.ForTests"})
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    answers: list[Any] = []
    ending: list[bool] = []

    def died(why: str) -> None:
        if not ending:
            print(why, flush=True)
            os._exit(1)

    try:
        driver = Driver(llm, await llm.get_supported_tasks(), request, folder, died)
        print(f"ready {time.monotonic() - started:.1f} s", flush=True)
        for name, keywords in request["steps"]:
            began = time.monotonic()
            answers.append(await asyncio.wait_for(getattr(driver, name)(**keywords), STEP_LIMIT_S))
            print(f"{name} {time.monotonic() - began:.3f} s {str(answers[-1])[:300]}", flush=True)
    finally:
        ending.append(True)
        llm.shutdown(timeout=0)
    return {"answers": answers}


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(asyncio.run(main(json.loads(asked.read_text()), answered.parent))))
