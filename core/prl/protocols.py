"""The seams. Each protocol is what one kind of plugin provides, or what the loop needs of a role."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from prl.adapters import Adapter as Adapter
from prl.messages import (
    EngineGauges,
    EngineHealth,
    EpisodeRequest,
    GenerateRequest,
    Generation,
    Installed,
    TrainBatch,
    TrainReport,
    WeightsRef,
)
from prl.plan import LaunchState, Plan, Role
from prl.types import Credit, Episode, Message, Outcome, Reward, Rollout, RolloutHeader, Split, Task, Turn

if TYPE_CHECKING:
    from prl.config.bench import BenchConfig
    from prl.config.schema import RunConfig, SftConfig, Table
    from prl.rundir import RunDir

# --- environments -----------------------------------------------------------------------------------------


class Agent(Protocol):
    """One seat of an episode, played by a model. It keeps its own history."""

    name: str
    messages: list[Message]

    async def reply(
        self,
        messages: str | Message | Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """Append `messages` to the conversation and sample one turn.

        Raises:
            EpisodeFailed: the engine failed, or the deadline passed. Environments let it through.
        """
        ...

    def finish(self, rewards: float | Mapping[str, float | Reward | None]) -> Rollout:
        """End this agent's part with its rewards; a bare number is the reward named "reward"."""
        ...


class Context(Protocol):
    """All that an environment may use. `deadline` is in `time.monotonic()` seconds."""

    rng: random.Random
    deadline: float
    log: logging.Logger
    kind: Split

    def agent(self, name: str = "policy", *, trainable: bool = True) -> Agent: ...


@runtime_checkable
class Env(Protocol):
    """An environment. `tasks` is deterministic in the config's seed; train and eval splits are disjoint."""

    def tasks(self, split: Split) -> Sequence[Task] | Iterable[Task]: ...

    async def run(self, task: Task, ctx: Context) -> Episode: ...


# --- algorithms -------------------------------------------------------------------------------------------


class GroupMember(msgspec.Struct, frozen=True):
    """One finished episode of a group, as credit assignment sees it."""

    episode_id: int
    rollouts: tuple[RolloutHeader, ...]
    metrics: Mapping[str, float]


class Algorithm(Protocol):
    """Credit assignment: a pure function of one group, plus state that is saved in checkpoints."""

    min_members: int
    """A group with fewer scored members is dropped: a baseline needs something to compare with."""

    def credit(self, members: Sequence[GroupMember]) -> list[list[Credit]]:
        """One list per member with one `Credit` per trainable sample, in the order of its rollouts."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


# --- engines ----------------------------------------------------------------------------------------------


class EngineClient(Protocol):
    """An inference server with the current policy. The wire behind it is the engine plugin's own business."""

    async def generate(self, request: GenerateRequest) -> Generation: ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every token given those before it (the first is 0), at temperature 1."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens; requests stay. Idempotent."""
        ...

    async def install(self, weights: WeightsRef) -> Installed:
        """Load, install and verify one version: it reads them while generation goes on, swaps them between two tokens
        of the requests in flight, and goes on. On any error the engine holds exactly one whole version. One that is
        held already is not installed again, and answered as before.

        Returns:
            How well the engine reproduces the probes (`prl.engine.probes.check`).

        Raises:
            WeightsError: checksums or probes do not agree; the former version is still installed.
        """
        ...

    async def resume(self) -> None: ...

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None: ...


class SleepingEngineClient(EngineClient, Protocol):
    """Of an engine whose schema says `can_sleep`: with `engine.sleep` it makes room for the trainer on its GPU."""

    async def sleep(self) -> None:
        """Stop, and free the memory of the GPU, until `wake`. Requests stay. Idempotent."""
        ...

    async def wake(self) -> None:
        """Take the memory again: the same weights, empty caches. Idempotent."""
        ...


class EnginePlugin(Protocol):
    """An inference server. Its schema may say, as `takes_adapters`, that it serves low-rank adapters beside the model
    it started with: then `prl.adapters.published` tells it which ones the trainer will send.

    A schema with the key `api_port` says that each process offers an OpenAI-compatible HTTP interface with the run's
    token as its key, on that port plus its replica, or on a free one for 0. The process registers with `info["api"]`,
    "http://127.0.0.1:8000/v1", and `info["model"]`, the name to ask for there. `prl serve` needs it.

    It may have `installed()`, which says for `prl doctor` what it found of what is not beside prl, or raises
    `EnvironmentNotFit`, and `versions()`, the same by name for `lock.json`. A schema may have `problems(config:
    RunConfig)`: pairs of a dotted key and a message, what its server would not start with. It may take a while, so
    only commands that start something ask."""

    def role(self, config: RunConfig) -> Role:
        """The server's part of the plan. It is started with the run directory and registers its address."""
        ...

    def connect(self, address: str, token: str) -> EngineClient: ...


# --- trainers and weight channels -------------------------------------------------------------------------


class TrainerPlugin(Protocol):
    def role(self, config: RunConfig | SftConfig) -> Role:
        """Its part of the plan. For an `SftConfig` that is the whole run: there is no controller then."""
        ...

    def export(self, run_dir: RunDir, step: int, out: Path, *, dtype: str = "", adapter: bool = False) -> None:
        """Write the checkpoint of a step, a supervised run's too, as a Hugging Face folder.

        `out` does not exist or is empty. Called in a process of its own, which may import torch. `dtype` is that of
        the weights, "" the run's own. `adapter` asks for low-rank adapters alone, in PEFT's format.

        Raises:
            StoreError: the checkpoint is damaged. UsageError: there are no adapters.
        """
        ...

    def import_weights(self, run_dir: RunDir, step: int, source: str, out: Path) -> dict[str, str]:
        """Write this trainer's part of a checkpoint into `out`: the weights of `source`, a Hugging Face folder or a
        name on the hub, with an optimiser that has not begun; all else as in the checkpoint of `step`.

        Called in a process of its own, which may import torch.

        Returns:
            File name, relative to `out`, to its sha256.

        Raises:
            UsageError: the model there is not the run's. StoreError: a checkpoint is damaged, or `out` refuses.
        """
        ...

    def bench(self, config: BenchConfig, request: Path) -> tuple[str, ...]:
        """argv of what measures a step on synthetic data: it reads `request`, the configuration as JSON, prints its
        report, and writes a list of rows beside it, to `request.with_name("rows.json")`."""
        ...


class ChannelSender(Protocol):
    """The trainer's half. `tensors` are (disk name, torch tensor) pairs; each is used once and not kept."""

    def send(
        self,
        version: int,
        incarnation: int,
        tensors: Iterable[tuple[str, Any]],
        probes: Sequence[Probe],
        tolerance: float,
        adapter: Adapter | None = None,
    ) -> WeightsRef:
        """Make one version available. `tolerance` is the mean absolute difference of log-probabilities that an
        engine's answer to `probes` may show; it travels with them. Sending a version again replaces it.

        With `adapter`, the tensors are those low-rank adapters alone, under PEFT's names, always all of them; the
        reference says so, and the description arrives with them.
        """
        ...

    def release(self, versions: Sequence[int]) -> None:
        """Forget versions that every reader has acknowledged. An unknown or already released one is ignored."""
        ...


class ChannelReceiver(Protocol):
    """The engine's half. `receive` checks every checksum before it returns anything.

    Raises:
        WeightsError: the version is incomplete or corrupted.
    """

    def receive(self, weights: WeightsRef) -> ReceivedWeights: ...


class Probe(msgspec.Struct, frozen=True):
    """A short sequence with the trainer's own log-probabilities (first token 0), to be reproduced after installing.
    Its tokens from `first` on were sampled by the policy a moment ago; those before are their context."""

    token_ids: list[int]
    logprobs: list[float]
    first: int = 1


class ReceivedWeights(msgspec.Struct):
    """One version: whole weights, or, with `adapter`, adapters over the model the engine started with."""

    tensors: Mapping[str, Any]
    probes: list[Probe]
    tolerance: float
    adapter: Adapter | None = None


class ChannelPlugin(Protocol):
    def sender(self, directory: Path) -> ChannelSender: ...

    def receiver(self) -> ChannelReceiver: ...


# --- launchers and monitors -------------------------------------------------------------------------------


class Launcher(Protocol):
    """It may have `check(plan)`, which raises `EnvironmentNotFit` where it could not give what the plan needs. It is
    asked before a run directory is made, and by `prl config check`."""

    def run(self, plan: Plan, run_dir: RunDir, on_tick: Callable[[LaunchState], None] | None = None) -> int:
        """Execute the plan to its end and return the exit code of the run.

        `on_tick` is called about four times a second from the thread that called `run`, and a last time with
        phase "ended" before the launcher says on stderr why a run failed.
        """
        ...


class Monitor(Protocol):
    """Receives what is also in the run directory. It runs off the loop; one that raises is muted."""

    def start(self, config: Table, run_dir: RunDir) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, outcome: str) -> None: ...


# --- what the loop needs of the roles (fakes of these are in prl.testing) ---------------------------------


class EpisodeRunner(Protocol):
    async def tasks(self, env: str, split: Split, start: int, count: int) -> list[Task]: ...

    async def run(self, request: EpisodeRequest) -> Outcome:
        """Raises:
        EpisodeFailed: with a reason that is counted, and whether another attempt may succeed.
        """
        ...


class TrainerClient(Protocol):
    dp_size: int

    async def train(self, batches: Sequence[TrainBatch]) -> TrainReport:
        """One batch per data-parallel rank."""
        ...

    async def publish(self, version: int) -> WeightsRef: ...

    async def release(self, versions: Sequence[int]) -> None: ...

    async def snapshot(self, step: int) -> None:
        """Keep a copy of what a checkpoint of this step, the last one trained, needs: training may go on."""
        ...

    async def checkpoint(self, step: int, path: Path) -> dict[str, str]:
        """Write the snapshot of this step into `path`, while training goes on. Returns when the files are on the disk:
        their names, relative to `path`, with their sha256."""
        ...


class EngineFleet(Protocol):
    @property
    def version(self) -> int:
        """The oldest version any serving engine holds: what a rollout that starts now may be sampled with."""
        ...

    def gauges(self) -> Sequence[EngineGauges]:
        """How loaded each serving engine is, as it last said: what adaptive concurrency goes by."""
        ...

    def reading(self) -> Collection[int]:
        """Versions that an engine is reading at this moment, which must not be released."""
        ...

    async def install(self, weights: WeightsRef) -> Installed:
        """Those that sleep are woken first. Answers with the largest figures of any engine."""
        ...

    async def sleep(self) -> None:
        """Every engine frees its GPU's memory, until the next `install`."""
        ...
