"""How fast the data plane is: packing, and the production loop from dispatch to packed batch, with fake roles.

    python benchmarks/data_plane.py [packing] [loop] [wire] [store]     (all of them without arguments)

Each part runs in a fresh process pinned to one core; the roles at the other end of ZeroMQ run in a process of their
own on another core. The result goes to benchmarks/results/data_plane.json with date, hardware, versions and command.
Rates are given by the clock on the wall and by the CPU time of the process (all its threads): the first says what was
reached here, the second what the core would reach without other work on the machine, whose load stands beside it.

packing   10,000 samples of 1,000,000 tokens: `pack`, and `pack` + building + encoding every `TrainBatch` row
loop      generate, score, batch, train and publish over in-process fakes, 1,000 tokens a rollout, batches encoded
wire      the same loop, with episodes dispatched to and tokens collected from another process through ZeroMQ
store     CPU of the run store per rollout, Parquet included, at 30 and 1,000 tokens a rollout
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prl.controller.clients import WireRunner
from prl.controller.hub import Hub
from prl.loop.supervisor import Loop
from prl.messages import (
    COLLECT,
    LIST_TASKS,
    NOTHING,
    REGISTER,
    RUN_EPISODE,
    SET_ENGINES,
    SHUTDOWN,
    CollectedEpisode,
    CollectedRollout,
    CollectRequest,
    EngineAddress,
    EngineSet,
    EpisodeReply,
    EpisodeRequest,
    Installed,
    Nothing,
    Register,
    TaskPage,
    TrainBatch,
    TrainReport,
    TrainSample,
    WeightsRef,
)
from prl.packing import pack
from prl.rows import denominators
from prl.rundir import RunDir
from prl.store import RolloutRecord, StoreWriter
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_sample, fake_state
from prl.types import Credit, Message, Reward, Rollout, RolloutHeader, SampleHeader, Task
from prl.wire import Client, Peer

RESULT = Path(__file__).parent / "results" / "data_plane.json"
ROW_TOKENS = 16384
NUM_TOKENS = 1000
GROUP_SIZE, GROUPS_PER_STEP = 8, 64
TOKEN = "benchmark"

PARTS = ("packing", "loop", "wire", "store")
TARGETS = {
    "packing": "pack <= 40 ms, pack + build + encode <= 100 ms, rows <= bound + 1",
    "loop": ">= 10,000 rollouts/s",
    "wire": ">= 6,000 rollouts/s",
    "store": "<= 60 us of CPU per rollout",
}

_encode = msgspec.msgpack.Encoder().encode


# --- packing ---


def lengths_of_a_million_tokens() -> dict[str, list[int]]:
    rng = np.random.default_rng(1)
    raw = {
        "lognormal": rng.lognormal(4.2, 0.9, 10_000),
        "uniform": rng.integers(1, 200, 10_000).astype(float),
        "pareto": rng.pareto(1.5, 10_000) * 50 + 1,
        "equal": np.full(10_000, 100.0),
    }
    return {name: np.clip(v * (1e6 / v.sum()), 1, ROW_TOKENS).round().astype(int).tolist() for name, v in raw.items()}


def packing() -> dict[str, Any]:
    result = {}
    for name, lengths in lengths_of_a_million_tokens().items():
        samples = [_train_sample(length) for length in lengths]

        def build(lengths: Sequence[int] = lengths, samples: Sequence[TrainSample] = samples) -> bytes:
            (rows,) = pack(lengths, ROW_TOKENS)
            whole = denominators((sample.header, sample.credit) for sample in samples)
            batch = [[TrainSample(s.header, s.credit, s.body) for s in map(samples.__getitem__, row)] for row in rows]
            return _encode(TrainBatch("run", 0, 1, 0, batch, whole))

        (rows,) = pack(lengths, ROW_TOKENS)
        result[name] = {
            "samples": len(lengths),
            "tokens": sum(lengths),
            "rows": len(rows),
            "bound": -(-sum(lengths) // ROW_TOKENS),
            "pack_ms": _milliseconds(lambda lengths=lengths: pack(lengths, ROW_TOKENS)),
            "pack_8_ranks_ms": _milliseconds(lambda lengths=lengths: pack(lengths, ROW_TOKENS, 8)),
            "pack_build_encode_ms": _milliseconds(build),
            "encoded_bytes": len(build()),
        }
    return result


def _train_sample(length: int) -> TrainSample:
    if length == 1:
        body, header = fake_sample(2, 1, (3,))
        return TrainSample(header, Credit(((2, 0.5),), ((2, 1.0),)), body)
    body, header = fake_sample(length, max(1, length // 4), (3,))
    return TrainSample(header, Credit(((length, 0.5),), ((length, 1.0),)), bytes(bytearray(body)))


def _milliseconds(call: Callable[[], object], repeats: int = 7) -> dict[str, float]:
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {"median": round(1e3 * statistics.median(wall), 2), "cpu_median": round(1e3 * statistics.median(cpu), 2)}


# --- the loop, in process and over ZeroMQ ---


class EncodingTrainer(FakeTrainer):
    """Encodes every batch, as sending it to a real trainer would, and answers at once."""

    encoded = 0

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        self.encoded += sum(len(_encode(batch)) for batch in batches)
        return await super().train(batches)


def _config(steps: int) -> Any:
    config = fake_config(
        steps=steps, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=4, failure_window=256
    )
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"row_tokens": ROW_TOKENS})})


async def _save(step: int, data: bytes) -> None:
    pass


async def _timed_loop(runner: Any, fleet: FakeFleet, steps: int) -> dict[str, Any]:
    trainer = EncodingTrainer(keep=False)
    state = fake_state(_config(steps), runner=runner, trainer=trainer, fleet=fleet)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    await Loop(state, _save).run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rollouts = state.ledger.trained + state.ledger.dropped.total()
    return {
        "rollouts_per_s": round(rollouts / wall),
        "rollouts_per_cpu_s": round(rollouts / cpu),
        "cpu_us_per_rollout": round(1e6 * cpu / rollouts, 1),
        "rollouts": rollouts,
        "steps": steps,
        "encoded_bytes_per_rollout": round(trainer.encoded / rollouts),
        "staleness_max": state.staleness_max,
    }


def loop(steps: int = 40) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        fleet = FakeFleet()
        return await _timed_loop(FakeRunner(fleet, num_tokens=NUM_TOKENS, prompt_tokens=200, chunks=1), fleet, steps)

    return _best([asyncio.run(main()) for _ in range(3)])


class RemoteFleet(FakeFleet):
    """Tells the other process with which version it samples from now on."""

    def __init__(self, gateway: Peer) -> None:
        super().__init__()
        self._gateway = gateway

    async def install(self, weights: WeightsRef) -> Installed:
        await self._gateway.call(SET_ENGINES, EngineSet([EngineAddress(0, "", weights.version)]), timeout=30)
        return await super().install(weights)


def wire(steps: int = 40) -> dict[str, Any]:
    async def once(core: int) -> dict[str, Any]:
        hub = Hub(TOKEN, "fake", 0, 0, {})
        address = hub.server.start()
        command = [sys.executable, __file__, "--peer", address, str(core)]
        peer = await asyncio.create_subprocess_exec(*command)
        try:
            await hub.wait_for("env-fake", 1, timeout=60)
            await hub.wait_for("gateway", 1, timeout=60)
            gateway = hub.of("gateway")[0].peer
            result = await _timed_loop(WireRunner(hub), RemoteFleet(gateway), steps)
            gateway.notify(SHUTDOWN, NOTHING)
            await asyncio.wait_for(peer.wait(), 30)
            return result
        finally:
            if peer.returncode is None:
                peer.kill()
                await peer.wait()
            hub.server.close()

    own = min(os.sched_getaffinity(0))
    return {
        "other_process_on_its_own_core": _best([asyncio.run(once(_other_core())) for _ in range(3)]),
        "both_on_one_core": _best([asyncio.run(once(own)) for _ in range(3)]),
    }


def _best(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest of the repeats, with the rates of all of them: other work on the machine only ever slows down."""
    best = max(runs, key=lambda run: run["rollouts_per_s"])
    return {**best, "rollouts_per_s_all": [run["rollouts_per_s"] for run in runs]}


def _other_core() -> int:
    mine = os.sched_getaffinity(0)
    others = set(range(os.cpu_count() or 1)) - mine
    return min(others or mine)


async def peer(address: str) -> None:
    """Environment worker and gateway in one process, both over their own connections, both answering at once."""
    version = 0
    transcript = [Message("user", "question " * 20), Message("assistant", "answer " * 80)]
    stopped = asyncio.Event()

    def run_episode(_: object, request: EpisodeRequest) -> EpisodeReply:
        rewards = {"reward": Reward(request.seed % 1000 / 1000)}
        return EpisodeReply(request.episode_id, [Rollout("policy", True, transcript, [], rewards, num_turns=1)])

    def set_engines(_: object, request: EngineSet) -> Nothing:
        nonlocal version
        version = request.engines[0].version
        return NOTHING

    def collect(_: object, request: CollectRequest) -> list[CollectedEpisode]:
        body, header = fake_sample(NUM_TOKENS, 200, (version,))
        return [CollectedEpisode(i, [CollectedRollout("policy", (header,), [body])]) for i in request.episode_ids]

    def list_tasks(_: object, page: TaskPage) -> list[Task]:
        return [Task(f"{page.split}-{i}") for i in range(page.start, min(page.start + page.count, 100_000))]

    def shutdown(_: object, request: object) -> object:
        asyncio.get_running_loop().call_later(0.1, stopped.set)
        return NOTHING

    worker = Client(address, TOKEN, {RUN_EPISODE: run_episode, LIST_TASKS: list_tasks}, on_lost=stopped.set)
    gateway = Client(
        address, TOKEN, {COLLECT: collect, SET_ENGINES: set_engines, SHUTDOWN: shutdown}, on_lost=stopped.set
    )
    await worker.call(REGISTER, Register("env-fake", 0, os.getpid(), "fake"), timeout=30)
    await gateway.call(REGISTER, Register("gateway", 0, os.getpid(), "fake"), timeout=30)
    await stopped.wait()


# --- the store ---


def store(steps: int = 20, per_step: int = 256) -> dict[str, Any]:
    return {f"{tokens}_tokens": _store(tokens, steps, per_step) for tokens in (30, NUM_TOKENS)}


def _store(tokens: int, steps: int, per_step: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    records = [_record(rng, tokens, index) for index in range(per_step)]
    with tempfile.TemporaryDirectory() as folder:
        writer = StoreWriter(RunDir(folder))
        writer.rollout(1, records[0])
        writer.seal(1)  # imports pyarrow
        writer.flush()
        handing, cpu = 0.0, time.process_time()
        for step in range(2, steps + 2):
            start = time.perf_counter()
            for record in records:
                writer.rollout(step, record)
            writer.metrics(step, {"loss": 1.0})
            writer.seal(step)
            handing += time.perf_counter() - start
            writer.flush()
        cpu = time.process_time() - cpu
        writer.close()
        size = sum(path.stat().st_size for path in Path(folder, "rollouts").glob("*.parquet"))
    count = steps * per_step
    return {
        "cpu_us_per_rollout": round(1e6 * cpu / count, 1),
        "event_loop_us_per_rollout": round(1e6 * handing / count, 2),
        "parquet_bytes_per_rollout": round(size / count),
    }


def _record(rng: np.random.Generator, tokens: int, index: int) -> RolloutRecord:
    prompt = tokens // 3
    sampled = np.arange(tokens) >= prompt
    body = [
        (rng.zipf(1.3, tokens) % 50_000).astype("<i4").tobytes(),
        sampled.tobytes(),
        np.where(sampled, -rng.exponential(0.4, tokens), 0).astype("<f4").tobytes(),
        np.where(sampled, 3, -1).astype("<i4").tobytes(),
    ]
    header = SampleHeader(tokens, ((prompt, tokens - prompt),), 3, 3)
    reward = float(rng.random())
    rollout = RolloutHeader("policy", True, reward, {"exact": Reward(reward)}, (header,), num_turns=1)
    transcript = _encode(
        [[Message("user", "Reverse: abcdefghijkl"), Message("assistant", "x" * 4 * (tokens - prompt))]]
    )
    return RolloutRecord(
        index,
        "echo",
        f"train-{index // 8}",
        index // 8,
        rollouts=(rollout,),
        bodies=[_encode(body)],
        credits=[Credit(((tokens, reward - 0.5),), ((tokens, 1.0),))],
        transcript=transcript,
        metrics={"exact": reward},
        seconds=0.1,
    )


# --- running and recording ---


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main(parts: Sequence[str]) -> int:
    """Run every part in its own process, print its result and record all of them."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        print(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    chosen = parts or PARTS
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for part in chosen:
        command = [sys.executable, __file__, "--part", part]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600).stdout
        result[part] = {
            "target": TARGETS[part],
            "result": json.loads(output),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "load_before": round(os.getloadavg()[0], 2),
        }
        print(part, json.dumps(result[part], indent=2))
    result["hardware"] = f"{_cpu_name()}, {os.cpu_count()} cores"
    result["versions"] = {"python": platform.python_version(), "numpy": np.__version__, "msgspec": msgspec.__version__}
    result["command"] = "python benchmarks/data_plane.py"
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        os.sched_setaffinity(0, {int(sys.argv[3])})
        asyncio.run(peer(sys.argv[2]))
    elif sys.argv[1:2] == ["--part"]:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps({"packing": packing, "loop": loop, "wire": wire, "store": store}[sys.argv[2]]()))
    else:
        sys.exit(main(sys.argv[1:]))
