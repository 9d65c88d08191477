"""The controller's stand-in in vllm_generation.py: everything of a run but the loop.

It registers the real roles (engine, trainer, gateway, environment worker) at the controller's `Hub`, dispatches
episodes through its `WireRunner` and collects their tokens, and publishes through its `WireTrainer` and `WireFleet`.
Every `swap_every_s` the trainer takes one real step, on a few samples that have just been collected, so that weights do
change; its new version is installed while generation goes on. Every measurement's row is appended to the request's
`out`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from prl import keys, process
from prl.config.load import read_resolved
from prl.config.schema import RunConfig
from prl.controller.clients import WireRunner, WireTrainer
from prl.controller.fleet import WireFleet
from prl.controller.hub import Hub
from prl.messages import NOTHING, SHUTDOWN, EpisodeRequest, TrainBatch, TrainSample, TrainUpdate
from prl.planning import env_role
from prl.rows import denominators
from prl.rundir import RunDir
from prl.store.files import atomic_write
from prl.types import Credit, Outcome, SampleBody, Sampling, Task

Found = dict[str, Any]
DEADLINE_S = 600.0
_body = msgspec.msgpack.Decoder(SampleBody).decode


class Driver:
    """`asked` is the request of vllm_generation.py: requests in flight, measurements, seconds between swaps."""

    def __init__(self, run_dir: RunDir, asked: Found) -> None:
        self.asked = asked
        self.config = read_resolved(run_dir.config, RunConfig)
        self.run_dir = run_dir
        self.token = run_dir.token.read_text().strip()
        self.hub = Hub(self.token, run_dir.name, 0, 0, {})
        self.label = self.config.envs[0].label
        self.version = 0
        self.swaps: list[Found] = []
        self.recent: deque[TrainSample] = deque(maxlen=asked["train_samples"])
        self.episodes = 0

    async def run(self) -> None:
        atomic_write(self.run_dir.socket, self.hub.server.start().encode())
        began = time.monotonic()
        trainers = await self.hub.wait_for("trainer", 1, DEADLINE_S)
        (gateway,) = await self.hub.wait_for("gateway", 1, DEADLINE_S)
        await self.hub.wait_for(env_role(self.label), 1, DEADLINE_S)
        (self.engine,) = await self.hub.wait_for("engine", 1, DEADLINE_S)
        say(f"all roles have registered after {time.monotonic() - began:.0f} s")
        self.gateway = gateway.address
        self.trainer = WireTrainer(trainers)
        self.fleet = WireFleet(self.hub, self.config.engine.build(), self.token, lambda: None)
        self.client = self.config.engine.build().connect(self.engine.address, self.token)
        self.runner = WireRunner(self.hub)
        await self.fleet.install(await self.trainer.publish(0))
        say(f"version 0 is installed after {time.monotonic() - began:.0f} s")
        tasks = await self.runner.tasks(self.label, "train", 0, self.asked["prompts"])
        warm = await self.generate(tasks[: self.asked["in_flight"]], 8)
        self.recent.extend(map(sample, warm[-self.asked["train_samples"] :]))
        for _ in range(2):  # kernels are compiled, caches of the channel filled
            await self.swap()
        self.swaps.clear()
        for measurement in self.asked["measurements"]:
            row = await self.measure(tasks, measurement)
            append(Path(self.asked["out"]), row)
            say(f"{row['tokens_per_s']:,.0f} tokens/s, swaps {[swap.get('swap_stall_s') for swap in row['swaps']]}")

    async def measure(self, tasks: Sequence[Task], measurement: Found) -> Found:
        """One row: like the peer's, with what the weights did meanwhile and what each role cost."""
        count, tokens = measurement["requests"], measurement["tokens"]
        chosen = [tasks[index % len(tasks)] for index in range(count)]
        self.swaps = []
        swapping = asyncio.create_task(self.swap_for_ever())
        before = {label: cpu_seconds(pid) for label, pid in self.processes()}
        began = time.perf_counter()
        outcomes = await self.generate(chosen, tokens)
        seconds = time.perf_counter() - began
        after = {label: cpu_seconds(pid) for label, pid in self.processes()}
        swapping.cancel()
        await asyncio.gather(swapping, return_exceptions=True)
        if swapping.done() and not swapping.cancelled() and swapping.exception() is not None:
            raise RuntimeError("a swap failed") from swapping.exception()
        sampled = sum(header.num_sampled for outcome in outcomes for r in outcome.rollouts for header in r.samples)
        return {
            **measurement,
            "sampled": sampled,
            "seconds": round(seconds, 3),
            "tokens_per_s": round(sampled / seconds, 1),
            "swaps": self.swaps,
            "cores": {label: round((after[label] - before[label]) / seconds, 3) for label in before if label in after},
            **carried(outcomes),
        }

    async def generate(self, tasks: Sequence[Task], tokens: int) -> list[Outcome]:
        """Every task once, `in_flight` at a time."""
        limit = asyncio.Semaphore(self.asked["in_flight"])

        async def one(task: Task) -> Outcome:
            async with limit:
                outcome = await self.runner.run(self.request(task, tokens))
            self.recent.append(sample(outcome))
            return outcome

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    def request(self, task: Task, tokens: int) -> EpisodeRequest:
        self.episodes += 1
        number = self.episodes
        sampling = Sampling(max_tokens=tokens)
        key = keys.mint(self.token, number)
        return EpisodeRequest(number, self.label, task, number, sampling, self.gateway, key, DEADLINE_S)

    async def swap_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.asked["swap_every_s"])
            await self.swap()

    async def swap(self) -> None:
        """One step of the trainer, its new version in the engine, the old one released."""
        began = time.perf_counter()
        rows = [list(self.recent)]
        whole = denominators((one.header, one.credit) for one in self.recent)
        update = TrainUpdate(rows, whole)
        await self.trainer.train([TrainBatch(self.run_dir.name, 0, self.version + 1, self.version, [update])])
        trained = time.perf_counter()
        weights = await self.trainer.publish(self.version + 1)
        published = time.perf_counter()
        await self.fleet.install(weights)
        installed = time.perf_counter()
        await self.trainer.release([self.version])
        self.version += 1
        info = (await self.client.health()).info
        self.swaps.append(
            {
                "version": self.version,
                "bytes": weights.num_bytes,
                "train_s": round(trained - began, 4),
                "publish_s": round(published - trained, 4),
                "install_s": round(installed - published, 4),
                **{key: info[key] for key in ("swap_stall_s", "install_held_s", "probes_differ") if key in info},
            }
        )

    def processes(self) -> list[tuple[str, int]]:
        """What costs processor time: this process, every role's, and what an engine has started beside its own."""
        found = [("controller", os.getpid())]
        for connection in self.hub.connections.values():
            found.append((connection.role, connection.pid))
            if connection.role == "engine":
                children = psutil.Process(connection.pid).children(recursive=True)
                found += [(f"engine/{index}", child.pid) for index, child in enumerate(children)]
        return found

    async def end(self) -> None:
        self.hub.needed = False
        calls = [connection.peer.call(SHUTDOWN, NOTHING, timeout=2.0) for connection in self.hub.connections.values()]
        await asyncio.gather(*calls, return_exceptions=True)


def sample(outcome: Outcome) -> TrainSample:
    """What the trainer learns from it: alternating advantages, so that the weights move but go nowhere."""
    header = outcome.rollouts[0].samples[0]
    length = header.num_tokens
    advantage = 1.0 if outcome.episode_id % 2 else -1.0
    return TrainSample(header, Credit(((length, advantage),), ((length, 1.0),)), outcome.bodies[0])


def carried(outcomes: Sequence[Outcome]) -> Found:
    """Tokens of each version, and how many sequences have tokens of several."""
    tokens: Counter[int] = Counter()
    crossing = 0
    for outcome in outcomes:
        segment = _body(outcome.bodies[0]).segment()
        versions, counts = np.unique(segment.versions[segment.sampled], return_counts=True)
        tokens.update(dict(zip(versions.tolist(), counts.tolist(), strict=True)))
        crossing += len(versions) > 1
    return {"token_versions": {str(version): tokens[version] for version in sorted(tokens)}, "crossing": crossing}


def cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def append(path: Path, row: Found) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(folder: str, request: str) -> None:
    asked = json.loads(Path(request).read_text())

    async def drive() -> int:
        driver = Driver(RunDir(folder), asked)
        try:
            await driver.run()
        finally:
            await driver.end()
        return 0

    process.run("controller", lambda: asyncio.run(drive()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
