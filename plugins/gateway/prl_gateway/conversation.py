"""One agent's conversation: its messages and, behind them, the exact tokens.

A conversation is a line of turns. Each turn extends the current segment by the tokens of new messages (context) and the
tokens an engine sampled; text is never made into tokens that were sampled before. Where the line breaks (history was
edited, the template rewrote it, the temperature changed) another segment starts: a fork.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from prl.errors import EpisodeFailed
from prl.messages import Generation
from prl.types import Message, SampleBody, SampleHeader, Sampling, Turn
from prl_gateway.render import Renderer, Tools, Turned

_encode = msgspec.msgpack.Encoder().encode


class Tokens:
    """One segment as it grows. `logprobs` and `versions` are of the sampled tokens only, which `runs` locates."""

    __slots__ = ("ids", "logprobs", "runs", "temperature", "versions")

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.ids: list[int] = []
        self.runs: list[tuple[int, int]] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    def append(self, context: Sequence[int], generation: Generation) -> None:
        self.ids += context
        self.runs.append((len(self.ids), len(generation.token_ids)))
        self.ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += generation.versions

    def header(self) -> SampleHeader:
        return SampleHeader(len(self.ids), tuple(self.runs), min(self.versions), max(self.versions), self.temperature)

    def body(self) -> bytes:
        """The encoded `SampleBody`: little-endian arrays over all T tokens."""
        length = len(self.ids)
        sampled = bytearray(length)
        logprobs = array("f", bytes(4 * length))
        versions = array("i", b"\xff" * (4 * length))  # -1 where not sampled
        used = 0
        for start, count in self.runs:
            end = start + count
            sampled[start:end] = b"\x01" * count
            logprobs[start:end] = array("f", self.logprobs[used : used + count])
            versions[start:end] = array("i", self.versions[used : used + count])
            used += count
        ids = array("i", self.ids)
        return _encode(SampleBody(ids.tobytes(), bytes(sampled), logprobs.tobytes(), versions.tobytes()))


class Mark(NamedTuple):
    """After a turn: how many messages there were, the text before its answer, where its tokens end and how many of them
    were sampled."""

    num_messages: int
    text: str
    segment: Tokens
    end: int
    num_sampled: int


class Pending(NamedTuple):
    """A turn that is being sampled. Nothing of the conversation changes until it has been."""

    messages: list[Message]
    prompt_ids: list[int]
    context: Sequence[int]
    text: str
    base: Tokens | None
    """The segment that goes on; None starts another one with `prompt_ids` as context."""
    kept: int
    """Marks that stay valid."""
    temperature: float
    tools: Tools


class Conversation:
    """See the module. `forks` counts the segments that started because the line broke."""

    __slots__ = ("engine", "forks", "marks", "messages", "segments", "waiting")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.segments: list[Tokens] = []
        self.marks: list[Mark] = []
        self.forks = 0
        self.waiting = False
        self.engine: Any = None

    def prepare(
        self,
        keep: int,
        new: Sequence[Message],
        sampling: Sampling,
        renderer: Renderer,
        tools: Tools = (),
    ) -> Pending:
        """The prompt of the next turn after the first `keep` messages and `new`.

        Raises:
            EpisodeFailed: there are fewer messages than `keep`, or the template refuses them.
        """
        if keep > len(self.messages):
            raise EpisodeFailed(
                "lost_conversation",
                f"the conversation is said to have {keep} messages and the gateway holds {len(self.messages)}: it was "
                "restarted, or the episode was collected already",
                retryable=True,
            )
        messages = [*self.messages[:keep], *new]
        temperature = sampling.temperature or 1.0  # greedy log-probabilities are at temperature 1
        kept = len(self.marks)
        while kept and self.marks[kept - 1].num_messages > keep:
            kept -= 1
        if kept:
            mark = self.marks[kept - 1]
            tokens = mark.segment.ids
            before = Turned(tokens if mark.end == len(tokens) else tokens[: mark.end], mark.num_sampled, mark.text)
            more = renderer.extend(before, messages, mark.num_messages - 1, tools)
            if more is not None:
                goes_on = mark.segment is self.segments[-1] and mark.end == len(tokens)
                base = mark.segment if goes_on and temperature == mark.segment.temperature else None
                prompt_ids = before.token_ids + more.token_ids
                return Pending(messages, prompt_ids, more.token_ids, more.text, base, kept, temperature, tools)
        prompt = renderer.start(messages, tools)
        return Pending(messages, prompt.token_ids, (), prompt.text, None, 0, temperature, tools)

    def commit(self, pending: Pending, generation: Generation, renderer: Renderer) -> Turn:
        """Append what was sampled and return the assistant's turn."""
        segment = pending.base
        context = pending.context
        if segment is None:
            self.forks += bool(self.segments)
            segment, context = Tokens(pending.temperature), pending.prompt_ids
            self.segments.append(segment)
        segment.append(context, generation)
        sampled = generation.token_ids
        message = renderer.answer(sampled, generation.stop_reason == "stop", pending.tools, pending.prompt_ids)
        self.messages = [*pending.messages, message]
        self.marks[pending.kept :] = [Mark(len(self.messages), pending.text, segment, len(segment.ids), len(sampled))]
        return Turn(message, generation.stop_reason, len(sampled), len(pending.prompt_ids))
