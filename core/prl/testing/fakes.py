"""Fake roles for the production loop: no process, no torch, time that may be virtual.

`FakeRunner` samples tokens under whatever version `FakeFleet` holds while it "generates", so a rollout spans the weight
updates that happen during it, and its body says so: a test can check the staleness guarantee from the bodies alone.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prl.config.schema import RunConfig
from prl.errors import EpisodeFailed
from prl.loop.groups import Group
from prl.loop.state import LoopState, Roles
from prl.loop.tasks import TaskSource
from prl.messages import EngineGauges, EpisodeRequest, Installed, TrainBatch, TrainReport, TrainSample, WeightsRef
from prl.protocols import GroupMember
from prl.types import Credit, Outcome, Reward, RolloutHeader, SampleBody, SampleHeader, Split, Task

_encode = msgspec.msgpack.Encoder().encode
_decode_body = msgspec.msgpack.Decoder(SampleBody).decode


class FakeFleet:
    """Engines that hold one version; installing takes `seconds()` and is answered with `probed`. They say nothing of
    their load unless `gauges` is replaced."""

    def __init__(self, seconds: Callable[[], float] = lambda: 0.0) -> None:
        self.version = 0
        self.installed: list[int] = []
        self.asleep = False
        self.probed = Installed()
        self._seconds = seconds

    def gauges(self) -> Sequence[EngineGauges]:
        return ()

    def reading(self) -> Collection[int]:
        return ()

    async def install(self, weights: WeightsRef) -> Installed:
        await asyncio.sleep(self._seconds())
        self.asleep = False
        self.version = weights.version
        self.installed.append(weights.version)
        return self.probed

    async def sleep(self) -> None:
        self.asleep = True


class FakeRunner:
    """Environment, gateway and engine in one.

    Args:
        seconds: how long an episode takes, from its request.
        fails: an episode's failure, or None; called before the episode runs.
        reward: from the request; the default is random by the episode's own seed.
        num_tokens: T of every sample, of which the first `prompt_tokens` are not sampled.
        chunks: in how many pieces an episode is sampled; the version may change between two.
        num_tasks: length of each split.
    """

    def __init__(
        self,
        fleet: FakeFleet,
        *,
        seconds: Callable[[EpisodeRequest], float] = lambda request: 0.0,
        fails: Callable[[EpisodeRequest], EpisodeFailed | None] = lambda request: None,
        reward: Callable[[EpisodeRequest], float | None] | None = None,
        num_tokens: int = 8,
        prompt_tokens: int = 2,
        chunks: int = 3,
        num_tasks: int = 1000,
    ) -> None:
        self._fleet = fleet
        self._seconds = seconds
        self._fails = fails
        self._reward = reward or (lambda request: random.Random(request.seed).random())
        self._shape = (num_tokens, prompt_tokens)
        self._chunks = chunks
        self._num_tasks = num_tasks
        self.requests = 0
        self.running = 0

    async def tasks(self, env: str, split: Split, start: int, count: int) -> list[Task]:
        return [Task(f"{split}-{index}") for index in range(start, min(start + count, self._num_tasks))]

    async def run(self, request: EpisodeRequest) -> Outcome:
        self.requests += 1
        self.running += 1
        try:
            failure = self._fails(request)
            versions = [self._fleet.version]
            pause = self._seconds(request) / self._chunks
            for _ in range(self._chunks):
                await asyncio.sleep(pause)
                versions.append(self._fleet.version)
            if failure is not None:
                raise failure
            return self._outcome(request, tuple(versions[: self._chunks]))
        finally:
            self.running -= 1

    def _outcome(self, request: EpisodeRequest, versions: tuple[int, ...]) -> Outcome:
        body, header = fake_sample(*self._shape, versions)
        reward = self._reward(request)
        rewards = {"reward": None if reward is None else Reward(reward)}
        rollout = RolloutHeader("policy", True, reward, rewards, (header,), num_turns=1)
        return Outcome(request.episode_id, (rollout,), [body])


@functools.lru_cache(4096)
def fake_sample(num_tokens: int, prompt_tokens: int, versions: tuple[int, ...]) -> tuple[bytes, SampleHeader]:
    """An encoded body and its header: the sampled tokens are shared out among `versions`, in order."""
    sampled = np.arange(num_tokens) >= prompt_tokens
    spread = np.array_split(np.arange(prompt_tokens, num_tokens), len(versions))
    per_token = np.full(num_tokens, -1, "<i4")
    for version, positions in zip(versions, spread, strict=True):
        per_token[positions] = version
    body = SampleBody(
        np.arange(num_tokens, dtype="<i4").tobytes(),
        sampled.tobytes(),
        np.where(sampled, -1.0, 0.0).astype("<f4").tobytes(),
        per_token.tobytes(),
    )
    runs = ((prompt_tokens, num_tokens - prompt_tokens),)
    used = per_token[sampled]
    return _encode(body), SampleHeader(num_tokens, runs, int(used.min()), int(used.max()))


class FakeTrainer:
    """Takes `seconds()` a step and opens the bodies, as a real one would.

    `trained` holds, per step, the (min version, tokens) of every sample as its body says.
    """

    def __init__(self, seconds: Callable[[], float] = lambda: 0.0, *, dp_size: int = 1, keep: bool = True) -> None:
        self.dp_size = dp_size
        self.version = 0
        self.trained: dict[int, list[tuple[int, int]]] = {}
        self.released: list[int] = []
        self.snapshots: list[int] = []
        self._seconds = seconds
        self._keep = keep

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        step = batches[0].step
        assert step == self.version + 1 and len(batches) == self.dp_size
        assert len({tuple(len(update.rows) for update in batch.updates) for batch in batches}) == 1
        assert all(batch.version == self.version for batch in batches), "a batch for another version of the policy"
        await asyncio.sleep(self._seconds())
        if self._keep:
            bodies = [_decode_body(sample.body).segment() for sample in samples_of(batches)]
            self.trained[step] = [(int(body.versions[body.sampled].min()), len(body.token_ids)) for body in bodies]
        self.version = step
        return TrainReport(batches[0].incarnation, step, step, {"loss": 0.0}, 0.0)

    async def publish(self, version: int) -> WeightsRef:
        return WeightsRef(version, 0, f"fake:{version}")

    async def release(self, versions: Sequence[int]) -> None:
        self.released.extend(versions)

    async def snapshot(self, step: int) -> None:
        assert self.version in (0, step), f"a snapshot of step {step} at version {self.version}"
        await asyncio.sleep(0)
        self.snapshots.append(step)

    async def checkpoint(self, step: int, path: Path) -> dict[str, str]:
        return {}


def samples_of(batches: Sequence[TrainBatch]) -> list[TrainSample]:
    """Of all ranks, in the order they were sent."""
    return [sample for batch in batches for update in batch.updates for row in update.rows for sample in row]


class FakeAlgorithm:
    """Reward minus the mean of the group, on every sampled token."""

    min_members = 2

    def credit(self, members: Sequence[GroupMember]) -> list[list[Credit]]:
        rewards = [[r.reward or 0.0 for r in member.rollouts if r.trainable] for member in members]
        mean = sum(map(sum, rewards)) / max(1, sum(map(len, rewards)))
        return [
            [
                Credit(((header.num_tokens, reward - mean),), ((header.num_tokens, 1.0),))
                for rollout, reward in zip((r for r in member.rollouts if r.trainable), own, strict=True)
                for header in rollout.samples
            ]
            for member, own in zip(members, rewards, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass


class FakeSink:
    """Remembers what the loop reported."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.groups: list[tuple[int, int | None, str]] = []
        self.evaluations: list[tuple[int, str, int]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append((step, dict(values)))

    def event(self, kind: str, **data: object) -> None:
        self.events.append((kind, data))

    def group(self, group: Group, step: int | None, fate: str) -> None:
        self.groups.append((group.id, step, fate))

    def evaluated(self, step: int, env: str, episodes: Sequence[tuple[Task, Outcome]]) -> None:
        self.evaluations.append((step, env, len(episodes)))

    def seal(self, step: int) -> None:
        pass

    async def ready(self) -> None:
        pass


def fake_config(**loop: Any) -> RunConfig:
    """A configuration for fakes; keywords go into `[loop]`, evaluation is off."""
    table = {"steps": 5, "groups_per_step": 4, "group_size": 2, "max_staleness": 2, "failure_window": 10_000, **loop}
    return RunConfig.model_validate(
        {"name": "fake", "model": {"path": "none"}, "envs": [{"use": "fake"}], "loop": table, "eval": {"tasks": 0}}
    )


def fake_state(
    config: RunConfig,
    *,
    runner: FakeRunner | None = None,
    trainer: FakeTrainer | None = None,
    fleet: FakeFleet | None = None,
) -> LoopState:
    """A `LoopState` over fakes, ready for `prl.loop.supervisor.Loop`."""
    fleet = fleet or FakeFleet()
    runner = runner or FakeRunner(fleet)
    roles = Roles(runner, trainer or FakeTrainer(), fleet, token="fake")
    weights = {env.label: env.weight for env in config.envs}
    tasks = TaskSource(runner, weights, config.seed)
    return LoopState(config, roles, FakeAlgorithm(), tasks, FakeSink(), run_id=config.name)
