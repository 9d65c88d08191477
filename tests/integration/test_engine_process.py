"""Engine and gateway as processes under a controller that only lets them register."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prl import keys
from prl.config.schema import RunConfig
from prl.errors import WireError
from prl.messages import (
    COLLECT,
    NOTHING,
    REGISTER,
    REPLY,
    SET_ENGINES,
    SHUTDOWN,
    STATUS,
    CollectRequest,
    EngineAddress,
    EngineSet,
    GenerateRequest,
    Register,
    ReplyRequest,
    RoleStatus,
    Welcome,
)
from prl.rundir import RunDir
from prl.types import Message, Sampling
from prl.wire import Client, Peer, Server

TOKEN = "token"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>{% else %}{{ m.content }}<|sep|>"
    "{% endif %}{% endfor %}"
)


def write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=257, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>", "<|sep|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))


class Controller:
    """Waits for roles; `peers` and `addresses` are by role name."""

    def __init__(self, run_dir: RunDir) -> None:
        self.peers: dict[str, Peer] = {}
        self.addresses: dict[str, str] = {}
        self.gauges: dict[str, dict[str, float]] = {}
        self.changed = asyncio.Event()
        self.server = Server(TOKEN, {REGISTER: self._register, STATUS: self._status})
        run_dir.socket.write_text(self.server.start())

    def _register(self, peer: Peer, request: Register) -> Welcome:
        self.peers[request.role], self.addresses[request.role] = peer, request.address
        self.changed.set()
        return Welcome(0, 0)

    def _status(self, peer: Peer, status: RoleStatus) -> Any:
        self.gauges[status.role] = status.gauges
        return NOTHING

    async def wait_for(self, *roles: str) -> None:
        while not set(roles) <= set(self.peers):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)


@asynccontextmanager
async def running(path: Path, *roles: str) -> AsyncIterator[tuple[Controller, dict[str, subprocess.Popen[bytes]]]]:
    write_model(path / "model")
    run_dir = RunDir(path / "run")
    run_dir.control.mkdir(parents=True)
    run_dir.token.write_text(TOKEN)
    config = {
        "model": {"path": str(path / "model")},
        "envs": [{"use": "reverse_text"}],
        "engine": {"use": "embedded", "threads": 1, "slots": 16, "prefill_rows": 8, "device": "cpu"},
    }
    run_dir.config.write_text(RunConfig.model_validate(config).model_dump_json())
    controller = Controller(run_dir)
    modules = {"engine": "prl_engine_embedded", "gateway": "prl_gateway"}
    processes = {
        role: subprocess.Popen([sys.executable, "-m", modules[role], str(run_dir.path), "0"]) for role in roles
    }
    try:
        await controller.wait_for(*roles)
        yield controller, processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        controller.server.close()


def reply_request(episode: int, keep: int = 0) -> ReplyRequest:
    message = Message("user", f"episode {episode}")
    return ReplyRequest(keys.mint(TOKEN, episode), "policy", keep, (message,), Sampling(max_tokens=6), episode, 30.0)


@pytest.mark.slow
def test_turns_through_both_processes_and_a_clean_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "engine", "gateway") as (controller, processes):
            engines = EngineSet([EngineAddress(0, controller.addresses["engine"], 0)])
            gateway = controller.peers["gateway"]
            await gateway.call(SET_ENGINES, engines, timeout=10)
            worker = Client(controller.addresses["gateway"], TOKEN)
            turns = await asyncio.gather(*(worker.call(REPLY, reply_request(i), timeout=60) for i in range(40)))
            more = await asyncio.gather(*(worker.call(REPLY, reply_request(i, 2), timeout=60) for i in range(40)))
            assert all(0 < turn.num_tokens <= 6 for turn in turns + more)
            collected = await gateway.call(COLLECT, CollectRequest(list(range(40))), timeout=10)
            assert all(episode.error is None and len(episode.rollouts[0].headers) == 1 for episode in collected)
            assert all(len(episode.rollouts[0].headers[0].runs) == 2 for episode in collected)
            worker.close()
            for role in processes:
                await controller.peers[role].call(SHUTDOWN, NOTHING, timeout=10)
            codes = [await asyncio.to_thread(process.wait, 20) for process in processes.values()]
            assert codes == [0, 0]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_killed_engine_fails_its_clients_at_once(tmp_path: Path) -> None:
    from prl.engine.client import WireEngineClient

    async def scenario() -> None:
        async with running(tmp_path, "engine") as (controller, processes):
            client = WireEngineClient(controller.addresses["engine"], TOKEN)
            await client.pause()
            request = GenerateRequest("r", [1, 2, 3], Sampling(max_tokens=8), [], 0, 60.0)
            turn = asyncio.create_task(client.generate(request))
            await asyncio.sleep(0.1)
            os.kill(processes["engine"].pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(WireError, match="lost"):
                await turn
            with pytest.raises(WireError, match="gone"):
                await client.generate(request)
            assert time.monotonic() - began < 1
            await client.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_roles_end_with_their_controller(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, "engine", "gateway") as (controller, processes):
            controller.server.close()
            codes = [await asyncio.to_thread(process.wait, 20) for process in processes.values()]
            assert codes == [1, 1]

    asyncio.run(scenario())
