"""What the roles say to one another. Every exchange is a `Method`: a name, a request type, a reply type.

Payloads are msgspec structs in msgpack. What belongs to a run carries run id, incarnation, step and policy
version; the wire adds the schema version. Bodies of samples are opaque bytes here.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

from prl.types import (
    Credit,
    EpisodeError,
    Message,
    Rollout,
    SampleHeader,
    Sampling,
    Split,
    StopReason,
    Task,
    Turn,
)

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Method(Generic[Request, Reply]):
    """A named exchange with its types, so that both ends are checked."""

    __slots__ = ("decode_reply", "decode_request", "name")

    def __init__(self, name: str, request: type[Request], reply: type[Reply]) -> None:
        self.name = name
        self.decode_request = msgspec.msgpack.Decoder(request)
        self.decode_reply = msgspec.msgpack.Decoder(reply)


class Nothing(msgspec.Struct):
    """An empty request or reply."""


NOTHING = Nothing()

# --- every role -> controller -------------------------------------------------------------------------------


class Register(msgspec.Struct):
    """First message of a role. `address` is where it serves others, `host` the machine on which `pid` means it; `info`
    (its device, say) stands in status.json."""

    role: str
    replica: int
    pid: int
    run_id: str
    address: str = ""
    info: dict[str, Any] = {}
    host: str = ""


class Welcome(msgspec.Struct):
    """What the run goes on from: `version` above 0 is the step of the checkpoint to load."""

    incarnation: int
    version: int


class RoleStatus(msgspec.Struct):
    """A heartbeat, once a second. `busy` is cumulative seconds of useful work, `doing` one phrase for a person."""

    role: str
    replica: int
    busy: float
    doing: str
    gauges: dict[str, float] = {}


REGISTER = Method("register", Register, Welcome)
STATUS = Method("status", RoleStatus, Nothing)

# --- controller -> environment worker -------------------------------------------------------------------------


class EpisodeRequest(msgspec.Struct):
    """Run one task once. `key` opens this episode's conversations at the gateway and nothing else."""

    episode_id: int
    env: str
    task: Task
    seed: int
    sampling: Sampling
    gateway: str
    key: str
    deadline_s: float
    kind: Split = "train"
    attempt: int = 0


class EpisodeReply(msgspec.Struct):
    """What the worker reports: the environment's episode without tokens, or an error."""

    episode_id: int
    rollouts: list[Rollout] = []
    metrics: dict[str, float] = {}
    error: EpisodeError | None = None
    seconds: float = 0.0


class TaskPage(msgspec.Struct):
    """Ask a worker for tasks `[start, start + count)` of a split; the reply is shorter at the end of the split."""

    env: str
    split: Split
    start: int
    count: int


class CancelEpisode(msgspec.Struct):
    episode_id: int


RUN_EPISODE = Method("run_episode", EpisodeRequest, EpisodeReply)
CANCEL_EPISODE = Method("cancel_episode", CancelEpisode, Nothing)
LIST_TASKS = Method("list_tasks", TaskPage, list[Task])

# --- environment worker -> gateway ----------------------------------------------------------------------------


class ReplyRequest(msgspec.Struct):
    """Continue a conversation and sample one assistant turn.

    The conversation becomes its first `keep` messages followed by `messages`. When that extends what the
    gateway holds, the exact tokens are kept; otherwise a new segment starts.
    """

    key: str
    agent: str
    keep: int
    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int
    deadline_s: float
    tools: tuple[dict[str, Any], ...] = ()


REPLY = Method("reply", ReplyRequest, Turn)

# --- controller -> gateway ------------------------------------------------------------------------------------


class EngineAddress(msgspec.Struct):
    replica: int
    address: str
    version: int


class EngineSet(msgspec.Struct):
    """The engines that may serve from now on, each with the version it holds."""

    engines: list[EngineAddress]


class CollectRequest(msgspec.Struct):
    """Hand over, and forget, the conversations of these episodes. `discard` forgets without handing over."""

    episode_ids: list[int]
    discard: bool = False


class CollectedRollout(msgspec.Struct):
    """The samples of one agent: headers and, in the same order, their encoded bodies."""

    agent: str
    headers: tuple[SampleHeader, ...]
    bodies: list[bytes]


class CollectedEpisode(msgspec.Struct):
    episode_id: int
    rollouts: list[CollectedRollout]
    forks: int = 0
    error: EpisodeError | None = None


SET_ENGINES = Method("set_engines", EngineSet, Nothing)
COLLECT = Method("collect", CollectRequest, list[CollectedEpisode])

# --- controller -> trainer ranks ------------------------------------------------------------------------------


class TrainSample(msgspec.Struct, array_like=True):
    header: SampleHeader
    credit: Credit
    body: bytes


class TrainUpdate(msgspec.Struct):
    """One optimiser step for one data-parallel rank.

    `rows` holds the packed micro-batches of this rank: every rank has the same number, some possibly
    empty. `denominators` are of the whole update over all ranks, by component ("rl", "ce", "ref_kl").
    """

    rows: list[list[TrainSample]]
    denominators: dict[str, float]


class Correction(msgspec.Struct, frozen=True):
    """What the trainer does about tokens to which the engine gave another probability. `kind` is a value of
    `mismatch.correction`; "none" also where that is not in force."""

    kind: str = "none"
    clip: float = 2.0


class TrainBatch(msgspec.Struct):
    """What turns `version` into the next, for one data-parallel rank: `updates`, one after another.

    Ranks that share the rows of another get none: they have them from that rank. `correction` is the same for all.
    """

    run_id: str
    incarnation: int
    step: int
    version: int
    updates: list[TrainUpdate]
    correction: Correction = Correction()


class TrainReport(msgspec.Struct):
    """What a step did, reduced over ranks. `version` is the policy version after it."""

    incarnation: int
    step: int
    version: int
    metrics: dict[str, float]
    seconds: float


class PublishRequest(msgspec.Struct):
    version: int


class WeightsRef(msgspec.Struct, frozen=True):
    """Where an engine finds one version of the weights. `location` is the channel's own business. With `adapter` the
    version is low-rank adapters over the model the engine started with, and not whole weights."""

    version: int
    incarnation: int
    location: str
    num_bytes: int = 0
    adapter: bool = False


class Installed(msgspec.Struct, frozen=True):
    """How an engine that installed a version reproduces the trainer's probes.

    Args:
        probe_tokens: how many of their tokens the policy had sampled; with data-parallel ranks, the sum over these.
        probe_kl: mean of the k3 estimator of KL(engine || trainer) over those; 0 without any.
        probe_difference: mean absolute difference of log-probabilities over all tokens that were scored.
    """

    probe_tokens: int = 0
    probe_kl: float = 0.0
    probe_difference: float = 0.0


class ReleaseRequest(msgspec.Struct):
    """Every reader has acknowledged: these versions may be deleted."""

    versions: list[int]


class SnapshotRequest(msgspec.Struct):
    """Keep a copy of what a checkpoint of this step needs. Answered when training may go on."""

    step: int


class CheckpointRequest(msgspec.Struct):
    """Write the snapshot of this step into `path` (absolute), while training goes on. Answered when the files are on
    the disk; their digests go into the checkpoint's manifest."""

    step: int
    path: str


class CheckpointReply(msgspec.Struct):
    files: dict[str, str]
    """This rank's: file name, relative to `path`, to its sha256."""


TRAIN = Method("train", TrainBatch, TrainReport)
PUBLISH = Method("publish", PublishRequest, WeightsRef)
RELEASE = Method("release", ReleaseRequest, Nothing)
SNAPSHOT = Method("snapshot", SnapshotRequest, Nothing)
CHECKPOINT = Method("checkpoint", CheckpointRequest, CheckpointReply)

# --- engines --------------------------------------------------------------------------------------------------


class GenerateRequest(msgspec.Struct):
    """Continue `token_ids`. `seed` is this request's own random stream, where the engine can keep one. `session` names
    the conversation: requests that share it share a prefix, which an engine of several processes may route by."""

    id: str
    token_ids: list[int]
    sampling: Sampling
    stop_token_ids: list[int]
    seed: int
    deadline_s: float
    session: str = ""


class Generation(msgspec.Struct):
    """Sampled tokens, each with its log-probability at the sampling temperature and the version that sampled it."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason


class EngineHealth(msgspec.Struct):
    """`load` is running plus waiting requests; `busy` cumulative seconds of computing."""

    version: int
    incarnation: int
    paused: bool
    load: int
    busy: float
    info: dict[str, Any] = {}


class EngineGauges(msgspec.Struct, frozen=True):
    """What a serving engine said of its load in its last heartbeat: the gauges of these names.

    Args:
        kv_usage: share of the cache of keys and values that requests hold, 0 to 1.
        running, waiting: requests that are computed, and that wait for room in the cache or in the batch.
        preemptions: how often, since the engine started, a request lost its room and has to be computed again.
        capacity: tokens that the cache holds; 0 where the engine does not say, which leaves concurrency alone.
        age_s: since the heartbeat.
    """

    replica: int
    kv_usage: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    preemptions: float = 0.0
    capacity: float = 0.0
    age_s: float = 0.0


# --- controller -> every role, and anyone with the token -> controller -----------------------------------------


Action = Literal["pause", "resume", "checkpoint", "evaluate", "stop", "why-stuck", "scale"]


class ControlRequest(msgspec.Struct):
    """What is asked of a run that is going on, with the run's token. `engines` is how many "scale" wants."""

    action: Action
    engines: int = 0


class ControlReply(msgspec.Struct):
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}


SHUTDOWN = Method("shutdown", Nothing, Nothing)
CONTROL = Method("control", ControlRequest, ControlReply)
