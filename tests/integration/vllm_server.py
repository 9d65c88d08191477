"""One real vLLM engine process, started as a launcher would, under a controller that only lets it register."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from prl.config.schema import RunConfig
from prl.engine.client import WireEngineClient
from prl.errors import WireError
from prl.messages import (
    NOTHING,
    REGISTER,
    SHUTDOWN,
    STATUS,
    GenerateRequest,
    Generation,
    Register,
    RoleStatus,
    Welcome,
)
from prl.rundir import RunDir
from prl.types import Sampling
from prl.wire import Peer, Server

from .conftest import make_tiny_model

TOKEN = "the-token-of-this-test"
START_S = 240.0
ENGINE = {
    "use": "vllm",
    "threads": 1,
    "enforce_eager": True,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 32,
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}


def make_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A model that vLLM's attention on a CPU takes (heads of 32 or more), with the tokenizer of the tiny one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tiny_model(folder)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 260, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 257,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).float().save_pretrained(folder)
    return folder


class VllmServer:
    """Started on construction. The controller runs in a thread, so that each test may have an event loop of its own."""

    def __init__(self, folder: Path, model: Path, **engine: Any) -> None:
        self.model = model
        self.run_dir = RunDir(folder / "run")
        for path in (self.run_dir.control, self.run_dir.logs):
            path.mkdir(parents=True)
        self.run_dir.token.write_text(TOKEN)
        config = {"model": {"path": str(model)}, "envs": [{"use": "reverse_text"}], "engine": {**ENGINE, **engine}}
        self.config = RunConfig.model_validate(config)
        self.run_dir.config.write_text(self.config.model_dump_json())
        self.registered: Register | None = None
        self.gauges: dict[str, float] = {}
        self.log = self.run_dir.logs / "engine-0.log"
        self._peer: Peer | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._wire = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)
        self.process = self._start()

    async def _serve(self) -> Server:
        server = Server(TOKEN, {REGISTER: self._register, STATUS: self._status})
        self.run_dir.socket.write_text(server.start())
        return server

    def _start(self) -> subprocess.Popen[bytes]:
        role = self.config.engine.build().role(self.config)
        names = {"{run_dir}": str(self.run_dir.path), "{replica}": "0"}
        argv = []
        for word in role.command:
            for name, value in names.items():
                word = word.replace(name, value)
            argv.append(word)
        environment = {**os.environ, **role.env, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            return subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)

    def _register(self, peer: Peer, request: Register) -> Welcome:
        self._peer, self.registered = peer, request
        return Welcome(0, 0)

    def _status(self, peer: Peer, status: RoleStatus) -> Any:
        self.gauges = status.gauges
        return NOTHING

    def wait(self) -> VllmServer:
        """Until it has registered."""
        deadline = time.monotonic() + START_S
        while self.registered is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.1)
        return self

    @property
    def info(self) -> dict[str, Any]:
        assert self.registered is not None
        return self.registered.info

    def use(self, body: Callable[[WireEngineClient], Coroutine[Any, Any, None]], patience_s: float = 90) -> None:
        """Run a coroutine with a client of this engine."""

        async def main() -> None:
            assert self.registered is not None
            client = self.config.engine.build().connect(self.registered.address, TOKEN)
            try:
                async with asyncio.timeout(patience_s):
                    await body(client)
            finally:
                await client.close()

        asyncio.run(main())

    def stop(self) -> int:
        """Ask it to end, as a controller does. Its exit code; a process that does not end is killed."""
        try:
            if self._peer is not None and self.process.poll() is None:
                call = self._peer.call(SHUTDOWN, NOTHING, timeout=10)
                asyncio.run_coroutine_threadsafe(call, self._loop).result(15)
                return self.process.wait(30)
            return -1
        finally:
            if self.process.poll() is None:
                self.process.kill()
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its group, as a launcher does
            except ProcessLookupError:
                pass
            self.process.wait()
            self._loop.call_soon_threadsafe(self._wire.close)
            self._loop.call_soon_threadsafe(self._loop.stop)


class Load:
    """So many requests in flight until it is left, far more than are computed at once: an answer is followed by the
    next request, so that whatever a test does inside meets sequences under way however fast the machine is."""

    def __init__(self, client: WireEngineClient, count: int, max_tokens: int) -> None:
        self.answers: list[tuple[list[int], Generation]] = []
        self.failures: list[WireError] = []
        self._client, self._count, self._max_tokens = client, count, max_tokens
        self._ending = False
        self._numbers = itertools.count()

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def underway(self, tokens: int = 160) -> None:
        """Until so many more have been sampled."""
        before = (await self._client.health()).info["tokens"]
        while (await self._client.health()).info["tokens"] < before + tokens:
            await asyncio.sleep(0.01)

    async def _ask(self) -> None:
        while not self._ending:
            number = next(self._numbers)
            prompt = [1, 2, 3, number % 256]
            request = GenerateRequest(
                f"load{id(self)}-{number}", prompt, Sampling(self._max_tokens, 1.0), [], number, 60.0
            )
            try:
                self.answers.append((prompt, await self._client.generate(request)))
            except WireError as error:
                self.failures.append(error)
