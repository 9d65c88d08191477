"""One episode, as training and evaluation both ask for it: its request, its own random stream, its attempts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from prl import keys
from prl.errors import EpisodeFailed, WireError
from prl.loop.groups import Failure
from prl.loop.state import LoopState
from prl.messages import EpisodeRequest
from prl.types import Outcome, Sampling, Split, Task

RETRY_DELAY_S = 0.2
"""Before the second attempt; it grows by as much each time."""


def request(
    state: LoopState,
    episode_id: int,
    env: str,
    task: Task,
    *,
    seed: int,
    temperature: float,
    kind: Split,
    attempt: int,
) -> EpisodeRequest:
    """What a worker is sent, with the key that opens this episode's conversations."""
    return EpisodeRequest(
        episode_id=episode_id,
        env=env,
        task=task,
        seed=seed,
        sampling=Sampling(state.config.sampling.max_tokens, temperature),
        gateway=state.roles.gateway,
        key=keys.mint(state.roles.token, episode_id),
        deadline_s=state.config.loop.episode_timeout_s,
        kind=kind,
        attempt=attempt,
    )


async def tried(state: LoopState, ask: Callable[[int], EpisodeRequest]) -> Outcome | Failure:
    """Try an episode until it succeeds, fails by its own fault, or has used up its attempts. `ask` makes the request of
    one attempt, counted from 0."""
    attempts = state.config.loop.max_attempts
    failure = Failure("no_attempt")
    for attempt in range(attempts):
        try:
            return await state.roles.runner.run(ask(attempt))
        except EpisodeFailed as error:
            failure = Failure(error.reason, str(error))
            if not error.retryable:
                return failure
        except WireError as error:
            failure = Failure("worker_lost", str(error))
        if attempt + 1 < attempts:
            await asyncio.sleep(RETRY_DELAY_S * (attempt + 1))
    return failure


def stream(seed: int, *parts: object) -> int:
    """A 63-bit seed of its own for every (run seed, what for): stable across processes, unlike `hash`."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
