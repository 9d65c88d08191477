"""What is kept of an episode, and how it lies in `rollouts/open.msgpack` and `rollouts/index.jsonl`.

The controller hands a `RolloutRecord` over without opening token bodies or transcripts; only the store's writer does,
off the event loop. `open.msgpack` is a sequence of frames, each a little-endian u32 length and that many bytes of
msgpack; a frame that a crash cut off is the last one and is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from prl.types import Credit, RolloutHeader, Split, StopReason, total_reward

Status = Literal["trained", "dropped", "failed", "eval"]

OPEN_FILE = "open.msgpack"
INDEX_FILE = "index.jsonl"


def kind_of(names: Iterable[str]) -> Literal["step", "evaluation", "probes"]:
    """What a line of `metrics.jsonl` with these names is of: an optimiser step; an evaluation after it; or the install
    of the version that the step made."""
    for name in names:
        if name.startswith("eval/"):
            return "evaluation"
        if name.startswith("mismatch/probe_"):
            return "probes"
    return "step"


class RolloutRecord(msgspec.Struct, array_like=True):
    """One episode, as it left the loop. One row per agent's rollout is made of it.

    Args:
        episode_id: None when it failed before anything came back.
        status: how the ledger counts it; "dropped" and "failed" say why in `error`.
        rollouts, bodies, transcript, metrics, seconds: of the `Outcome`.
        credits: one per sample of every trainable rollout, in order; None for a sample that got none, and an empty
            list when nothing was assigned at all.
    """

    episode_id: int | None
    env: str
    task_id: str
    group_id: int
    kind: Split = "train"
    status: Status = "trained"
    rollouts: tuple[RolloutHeader, ...] = ()
    bodies: list[bytes] = []
    credits: list[Credit | None] = []
    transcript: bytes = b""
    metrics: dict[str, float] = {}
    seconds: float = 0.0
    error: str = ""


class Frame(msgspec.Struct, array_like=True):
    """A record on its way to a sealed file. `file` is the step whose file it goes into; `step` the one that used it."""

    file: int
    step: int | None
    record: RolloutRecord


class IndexLine(msgspec.Struct):
    """One line of `index.jsonl` for one rollout: enough to filter and chart without opening any Parquet file."""

    file: int
    step: int | None
    episode_id: int | None
    env: str
    task_id: str
    group_id: int
    agent: str | None
    kind: str
    status: str
    reward: float | None
    advantage: float | None
    min_version: int | None
    max_version: int | None
    num_tokens: int
    num_sampled: int
    num_turns: int
    stop_reason: StopReason | None
    truncated: bool
    seconds: float
    error: str


_encode_frame = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode
_encode_line = msgspec.json.Encoder().encode


def sealed_path(rollouts: Path, step: int) -> Path:
    return rollouts / f"step_{step:06d}.parquet"


def sealed_steps(rollouts: Path) -> dict[int, Path]:
    """Sealed files by step, ascending."""
    found = {}
    for path in rollouts.glob("step_*.parquet"):
        digits = path.stem.removeprefix("step_")
        if digits.isdigit():
            found[int(digits)] = path
    return dict(sorted(found.items()))


def encode_frame(frame: Frame) -> bytes:
    data = _encode_frame(frame)
    return len(data).to_bytes(4, "little") + data


def read_frames(data: bytes) -> Iterator[tuple[Frame, int]]:
    """Frames with the offset where each ends, up to the first that is torn or damaged."""
    at = 0
    while at + 4 <= len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if end > len(data):
            return
        try:
            frame = _decode_frame(memoryview(data)[at + 4 : end])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        yield frame, end
        at = end


def index_lines(frame: Frame) -> bytes:
    """The index lines of one episode's rollouts; an episode that failed before it had any still gets one."""
    record = frame.record
    credits = iter(record.credits)
    lines = []
    for rollout in record.rollouts or (None,):
        line = IndexLine(
            frame.file,
            frame.step,
            record.episode_id,
            record.env,
            record.task_id,
            record.group_id,
            None,
            record.kind,
            record.status,
            None,
            None,
            None,
            None,
            0,
            0,
            0,
            None,
            False,
            round(record.seconds, 6),
            record.error,
        )
        if rollout is not None:
            _describe(line, rollout)
            if rollout.trainable and record.credits:
                line.advantage = _mean_advantage([next(credits) for _ in rollout.samples])
        lines.append(_encode_line(line))
    return b"\n".join(lines) + b"\n"


def _describe(line: IndexLine, rollout: RolloutHeader) -> None:
    line.agent = rollout.agent
    line.reward = rollout.reward if rollout.reward is not None else total_reward(rollout.rewards)
    line.num_turns = rollout.num_turns
    line.stop_reason = rollout.stop_reason
    line.truncated = rollout.truncated
    for sample in rollout.samples:
        line.num_tokens += sample.num_tokens
        if sample.num_sampled:
            line.num_sampled += sample.num_sampled
            low, high = line.min_version, line.max_version
            line.min_version = sample.min_version if low is None else min(low, sample.min_version)
            line.max_version = sample.max_version if high is None else max(high, sample.max_version)


def _mean_advantage(credits: list[Credit | None]) -> float | None:
    """Mean over the tokens that the credits cover."""
    runs = [run for credit in credits if credit is not None for run in credit.advantages]
    tokens = sum(count for count, _ in runs)
    return math.fsum(count * value for count, value in runs) / tokens if tokens else None
