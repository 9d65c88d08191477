"""What generation costs: the embedded engine with both schedulers, and the gateway in front of it.

    python benchmarks/generation.py [fixed] [continuous] [gateway]     (all of them without arguments)

Every process that is measured runs alone with one numeric thread and is asked for its CPU time through psutil, all
messages included; the process at the other end is not counted. The result goes to benchmarks/results/generation.json.

fixed, continuous   the demo's model (Llama, hidden 128, 2 layers, 4 heads, MLP 512, vocabulary 260, tied, float32),
                    prompts of 4-7 tokens, completions of 5-9: 256 at once, again and again; 1,024 in flight all the
                    time; the same with new weights every 256 completions, keys and values recomputed
gateway             single-turn episodes, 8 of each prompt: reply, generate, collect
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from prl import keys
from prl.engine import methods
from prl.engine.client import WireEngineClient
from prl.messages import (
    COLLECT,
    NOTHING,
    REPLY,
    SET_ENGINES,
    CollectRequest,
    EngineAddress,
    EngineSet,
    GenerateRequest,
    Generation,
    ReplyRequest,
    WeightsRef,
)
from prl.protocols import ReceivedWeights
from prl.types import Message, Sampling
from prl.wire import Client, Peer, Server

RESULT = Path(__file__).parent / "results" / "generation.json"
TOKEN = "benchmark"
TARGETS = {
    "fixed": "256 completions <= 180 ms of CPU",
    "continuous": "recorded only",
    "gateway": "one single-turn episode <= 300 us of CPU",
}
BATCH, REPEATS, IN_FLIGHT = 256, 8, 1024

# --- the processes that are measured ------------------------------------------------------------------------------


async def serve_engine(batching: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from prl.engine.server import EngineServer
    from prl_engine_embedded.backend import EmbeddedBackend
    from prl_engine_embedded.config import EmbeddedConfig
    from prl_engine_embedded.continuous import ContinuousScheduler
    from prl_engine_embedded.fixed import FixedScheduler
    from prl_engine_embedded.model import LoadedModel
    from prl_engine_embedded.slots import ATTENTION, register

    torch.set_num_threads(1)
    torch.manual_seed(0)
    register()
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    module.set_attn_implementation(ATTENTION if batching == "fixed" else "sdpa")
    model = LoadedModel(module, torch.device("cpu"), 128)
    own = EmbeddedConfig()
    scheduler: Any = (
        FixedScheduler(model, own.slots, own.prefill_rows) if batching == "fixed" else ContinuousScheduler(model, own)
    )
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    class Same:
        def receive(self, weights: WeightsRef) -> ReceivedWeights:
            return ReceivedWeights(tensors, [], 0.0)

    engine = EngineServer(EmbeddedBackend(model, scheduler, Same()))
    print(Server(TOKEN, engine.handlers()).start(), flush=True)
    await asyncio.sleep(3600)


async def serve_gateway(folder: str) -> None:
    from prl_gateway import template
    from prl_gateway.render import TemplateRenderer
    from prl_gateway.service import Gateway

    tokenizer = template.load(folder)
    gateway = Gateway(TOKEN, TemplateRenderer(tokenizer), lambda address: WireEngineClient(address, TOKEN))
    server = Server(TOKEN, {**gateway.worker_handlers(), **gateway.controller_handlers()})
    print(server.start(), flush=True)
    await asyncio.sleep(3600)


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """A measured process: its address and itself."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, __file__, "--serve", *arguments], stdout=subprocess.PIPE, env=env)
    try:
        assert child.stdout is not None
        yield child.stdout.readline().decode().strip(), psutil.Process(child.pid)
    finally:
        child.kill()
        child.wait()


class Meter:
    """CPU and wall time of a process since this was made."""

    def __init__(self, measured: psutil.Process) -> None:
        self._measured = measured
        self._cpu, self._wall = self._used(), time.perf_counter()

    def _used(self) -> float:
        times = self._measured.cpu_times()
        return float(times.user + times.system)

    def per(self, count: float, unit: float) -> dict[str, float]:
        cpu, wall = self._used() - self._cpu, time.perf_counter() - self._wall
        return {"cpu": round(cpu / count * unit, 1), "wall": round(wall / count * unit, 1)}


# --- the measurements -----------------------------------------------------------------------------------------------


async def engine(batching: str) -> dict[str, Any]:
    """Milliseconds for 256 completions."""
    rng = random.Random(0)
    number = iter(range(10**9))

    def request() -> GenerateRequest:
        index = next(number)
        prompt = [rng.randrange(256) for _ in range(rng.randint(4, 7))]
        return GenerateRequest(str(index), prompt, Sampling(max_tokens=rng.randint(5, 9)), [], index, 600.0)

    with process(batching) as (address, measured):
        client = WireEngineClient(address, TOKEN)
        limit = asyncio.Semaphore(IN_FLIGHT)
        done = 0

        async def one() -> int:
            nonlocal done
            async with limit:
                generation = await client.generate(request())
            done += 1
            return len(generation.token_ids)

        async def publish() -> None:
            nonlocal done
            version, due = 0, done + BATCH
            while True:
                await asyncio.sleep(0.002)
                if done >= due:
                    version, due = version + 1, due + BATCH
                    await client.install(WeightsRef(version, 0, ""))

        await asyncio.gather(*(one() for _ in range(BATCH)))
        meter, tokens = Meter(measured), 0
        for _ in range(REPEATS):
            tokens += sum(await asyncio.gather(*(one() for _ in range(BATCH))))
        result: dict[str, Any] = {"at_once_ms": meter.per(REPEATS, 1e3), "tokens": tokens // REPEATS}
        for name, publishing in (("streaming_ms", False), ("streaming_with_updates_ms", True)):
            updates = asyncio.create_task(publish()) if publishing else None
            meter = Meter(measured)
            await asyncio.gather(*(one() for _ in range(BATCH * REPEATS)))
            result[name] = meter.per(REPEATS, 1e3)
            if updates is not None:
                updates.cancel()
        await client.close()
    return result


async def gateway() -> dict[str, Any]:
    """Microseconds for one single-turn episode, beside an engine that answers at once."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "reverse_text"))
    from prepare import save_tokenizer

    words = [102, 101, 100, 99, 98, 97, 257]

    def generate(peer: Peer, batch: methods.GenerateBatch) -> Any:
        answer = Generation(words, [-0.1] * len(words), [0] * len(words), "stop")
        found = [methods.Finished(request.id, answer) for request in batch.requests]
        peer.notify(methods.FINISHED, methods.FinishedBatch(found))
        return NOTHING

    stand_in = Server(TOKEN, {methods.GENERATE: generate})
    engine_address = stand_in.start()
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        with process("gateway", folder) as (address, measured):
            client = Client(address, TOKEN)
            await client.call(SET_ENGINES, EngineSet([EngineAddress(0, engine_address, 0)]), timeout=10)

            async def episode(number: int) -> None:
                message = Message("user", f"text {number // 8}")
                key = keys.mint(TOKEN, number)
                request = ReplyRequest(key, "policy", 0, (message,), Sampling(), number, 60.0)
                await client.call(REPLY, request, timeout=60)

            async def batch(start: int) -> None:
                await asyncio.gather(*(episode(start + index) for index in range(BATCH)))
                await client.call(COLLECT, CollectRequest(list(range(start, start + BATCH))), timeout=60)

            await batch(0)
            meter, rounds = Meter(measured), 40
            for index in range(rounds):
                await batch((index + 1) * BATCH)
            result = {"episode_us": meter.per(rounds * BATCH, 1e6)}
            client.close()
    stand_in.close()
    return result


def main(parts: Sequence[str]) -> int:
    unknown = [part for part in parts if part not in TARGETS]
    if unknown:
        print(f"unknown part {unknown[0]!r}: choose from {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in parts or TARGETS:
        load = round(os.getloadavg()[0], 2)
        found = asyncio.run(gateway() if part == "gateway" else engine(part))
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        result[part] = {"target": TARGETS[part], "result": found, "date": date, "load_before": load}
        print(part, json.dumps(result[part], indent=2))
    result["hardware"] = f"{platform.machine()}, {os.cpu_count()} cores"
    result["command"] = "python benchmarks/generation.py"
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve_gateway(sys.argv[3]) if sys.argv[2] == "gateway" else serve_engine(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
