"""The data model: what an environment is given, what it returns, and what is trained.

Lengths are in tokens, times in seconds, versions are policy versions counted from 0 (step `s`
trains version `s-1` into version `s`). T is the number of tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "eval"]
StopReason = Literal["stop", "length", "aborted"]

SCHEMA_VERSION = 1
"""Version of every message and file format in this package; a reader refuses a newer one."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message in the OpenAI shape."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = None


class Task(msgspec.Struct, frozen=True):
    """One problem of an environment. Everything in it must survive a round trip through JSON.

    Args:
        id: unique within the environment and split; the same seed gives the same id and content.
        prompt: the first messages of the conversation, or free text an environment uses as it likes.
        data: whatever the environment needs to run and score the task.
    """

    id: str
    prompt: str | tuple[Message, ...] = ""
    data: dict[str, Any] = {}


class Reward(msgspec.Struct, frozen=True):
    """One named part of a rollout's reward, which is the sum of score times weight."""

    score: float
    weight: float = 1.0


class Turn(msgspec.Struct, frozen=True):
    """What an agent answered. The tokens behind it stay in the gateway.

    Args:
        message: the assistant's message, decoded.
        stop_reason: "length" when `max_tokens` or the context ended the turn.
        num_tokens: sampled tokens of this turn. num_prompt_tokens: tokens before them.
    """

    message: Message
    stop_reason: StopReason
    num_tokens: int
    num_prompt_tokens: int

    @property
    def text(self) -> str:
        return self.message.content


class Segment:
    """A contiguous token sequence of one rollout: `token_ids` i32[T], `sampled` bool[T],
    `logprobs` f32[T] (0 where not sampled; at the sampling temperature), `versions` i32[T]
    (-1 where not sampled). A conversation that breaks its own prefix starts another segment.
    """

    __slots__ = ("logprobs", "sampled", "token_ids", "versions")

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        sampled: NDArray[np.bool_],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
    ) -> None:
        self.token_ids = token_ids
        self.sampled = sampled
        self.logprobs = logprobs
        self.versions = versions


class Rollout(msgspec.Struct):
    """What one agent did in an episode.

    `segments` is empty inside an environment: the gateway holds the tokens. `rewards` maps a name to
    a reward, or to None while it has not been scored.
    """

    agent: str
    trainable: bool = True
    messages: list[Message] = []
    segments: list[Any] = []
    rewards: dict[str, Reward | None] = {}
    truncated: bool = False
    stop_reason: StopReason = "stop"
    num_turns: int = 0

    @property
    def reward(self) -> float | None:
        """Weighted sum of the rewards; None, never 0, until every one of them was scored."""
        return total_reward(self.rewards)


class EpisodeError(msgspec.Struct, frozen=True):
    """Where (`reason`, a short word that is counted) and how an episode went wrong."""

    reason: str
    message: str
    retryable: bool = False


class Episode(msgspec.Struct):
    """What `Env.run` returns: one rollout per agent, numbers worth charting, and what went wrong."""

    rollouts: list[Rollout]
    metrics: dict[str, float] = {}
    errors: list[EpisodeError] = []


def total_reward(rewards: Mapping[str, Reward | None]) -> float | None:
    """Weighted sum, or None when there is no reward or one of them was not scored."""
    if not rewards:
        return None
    total = 0.0
    for reward in rewards.values():
        if reward is None:
            return None
        total += reward.weight * reward.score
    return total


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are sampled. `temperature` 0 is greedy. Training requires `top_p` 1 and `top_k` 0:
    a truncated distribution makes every importance ratio wrong by the mass that was cut off.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


class SampleHeader(msgspec.Struct, array_like=True, frozen=True):
    """All that the controller knows of a sample; its tokens travel beside it as an opaque body.

    Args:
        num_tokens: T.
        runs: (start, length) of every contiguous sampled run, one per turn, ascending.
        min_version, max_version: over the sampled tokens.
        temperature: at which it was sampled.
    """

    num_tokens: int
    runs: tuple[tuple[int, int], ...]
    min_version: int
    max_version: int
    temperature: float = 1.0

    @property
    def num_sampled(self) -> int:
        return sum(length for _, length in self.runs)


class RolloutHeader(msgspec.Struct, frozen=True):
    """A rollout as the controller sees it: rewards and sample headers, no tokens."""

    agent: str
    trainable: bool
    reward: float | None
    rewards: dict[str, Reward | None]
    samples: tuple[SampleHeader, ...]
    truncated: bool = False
    stop_reason: StopReason = "stop"
    num_turns: int = 0


class SampleBody(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of one sample, little-endian: `token_ids` i32, `sampled` u8, `logprobs` f32, `versions` i32."""

    token_ids: bytes
    sampled: bytes
    logprobs: bytes
    versions: bytes

    def segment(self) -> Segment:
        return Segment(
            np.frombuffer(self.token_ids, "<i4"),
            np.frombuffer(self.sampled, np.bool_),
            np.frombuffer(self.logprobs, "<f4"),
            np.frombuffer(self.versions, "<i4"),
        )


class Outcome(msgspec.Struct):
    """What one finished episode brings to the loop.

    `bodies` holds one encoded `SampleBody` for every sample of every rollout, in order; `transcript`
    is the encoded list of each rollout's messages, which only the store opens.
    """

    episode_id: int
    rollouts: tuple[RolloutHeader, ...]
    bodies: list[bytes]
    metrics: dict[str, float] = {}
    seconds: float = 0.0
    transcript: bytes = b""
    forks: int = 0
    """How often a conversation broke its own token prefix and had to start another sample."""


Runs = tuple[tuple[int, float], ...]
"""A per-token stream as run lengths: ((length, value), ...), lengths adding up to T. It keeps credit
per token without token arrays in the controller."""


class Credit(msgspec.Struct, array_like=True, frozen=True):
    """What an algorithm assigns to one sample: an advantage and three component weights per token.

    `advantages` and `rl`, `ce`, `ref_kl` are run-length streams over the sample's T tokens; an empty
    stream means 0 everywhere. Values outside sampled runs are ignored for `rl` and `ref_kl`.
    """

    advantages: Runs = ()
    rl: Runs = ()
    ce: Runs = ()
    ref_kl: Runs = ()


def as_messages(
    messages: str | Message | Sequence[Message | Mapping[str, Any]], role: str = "user"
) -> tuple[Message, ...]:
    """Accept what an environment author would write: a text, a message, or a list of messages or dicts."""
    if isinstance(messages, str):
        return (Message(role, messages),)
    if isinstance(messages, Message):
        return (messages,)
    return tuple(m if isinstance(m, Message) else msgspec.convert(dict(m), Message) for m in messages)
