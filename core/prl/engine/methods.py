"""What the client and the server of an engine say to each other, over `prl.wire`.

Generation is not a call per request: the client sends every request of one loop tick as one message, the server
answers with every request that one decode step finished as one message. That costs about 5 us a request where a call
costs 50 us.
"""

from __future__ import annotations

import msgspec

from prl.messages import EngineHealth, GenerateRequest, Generation, Installed, Method, Nothing, WeightsRef


class GenerateBatch(msgspec.Struct):
    requests: list[GenerateRequest]


class Failure(msgspec.Struct):
    """Why a request ended without a generation. `reason` is empty when it is the engine's fault, not the episode's."""

    reason: str
    message: str
    retryable: bool = False


class Finished(msgspec.Struct):
    id: str
    generation: Generation | None = None
    failure: Failure | None = None


class FinishedBatch(msgspec.Struct):
    results: list[Finished]


class AbortBatch(msgspec.Struct):
    ids: list[str]


class ScoreRequest(msgspec.Struct):
    sequences: list[list[int]]


class ScoreReply(msgspec.Struct):
    logprobs: list[list[float]]


GENERATE = Method("engine.generate", GenerateBatch, Nothing)
FINISHED = Method("engine.finished", FinishedBatch, Nothing)
ABORT = Method("engine.abort", AbortBatch, Nothing)
SCORE = Method("engine.score", ScoreRequest, ScoreReply)
PAUSE = Method("engine.pause", Nothing, Nothing)
INSTALL = Method("engine.install", WeightsRef, Installed)
RESUME = Method("engine.resume", Nothing, Nothing)
SLEEP = Method("engine.sleep", Nothing, Nothing)
WAKE = Method("engine.wake", Nothing, Nothing)
HEALTH = Method("engine.health", Nothing, EngineHealth)
