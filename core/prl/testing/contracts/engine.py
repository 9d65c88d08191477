"""The contract of an inference engine: the role it declares, and what its client does.

`CHECKS` need only the plugin. `CLIENT_CHECKS` are coroutine functions for the `EngineClient` of a running engine, which
an engine's own tests call: `asyncio.run(check(client))`. Prompts use tokens below 8.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence

from prl.errors import PrlError
from prl.messages import GenerateRequest, Generation, WeightsRef
from prl.protocols import EngineClient, EnginePlugin
from prl.testing.contracts.trainer import a_config, check_role
from prl.types import Sampling

Make = Callable[[], EnginePlugin]
PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 1, 2], [2, 2])
PATIENCE_S = 30.0
"""For what must happen; a small model on a busy machine takes a fraction of it."""
QUIET_S = 0.3
"""For what must not happen."""
LOGPROB_TOLERANCE = 2e-3
"""Between sampling and scoring: two shapes of the same float32 computation."""

_ids = itertools.count()


def its_role_is_complete(make: Make) -> None:
    check_role(make().role(a_config()), "engine")


async def every_token_has_its_logprob_and_version(client: EngineClient) -> None:
    version = (await client.health()).version
    for prompt in PROMPTS:
        for temperature in (1.0, 0.7, 0.0):
            check_generation(await generate(client, prompt, temperature=temperature), 6, version)


async def logprobs_are_those_of_the_model(client: EngineClient) -> None:
    """At temperature 1, what sampling reports is what scoring the same tokens gives. Greedy reports the same."""
    for temperature in (1.0, 0.0):
        for prompt in PROMPTS:
            made = await generate(client, prompt, temperature=temperature)
            (scored,) = await client.score([[*prompt, *made.token_ids]])
            assert len(scored) == len(prompt) + len(made.token_ids), f"{len(scored)} scores"
            assert scored[0] == 0.0, f"the first token has nothing before it, its score is {scored[0]}"
            for sampled, score in zip(made.logprobs, scored[len(prompt) :], strict=True):
                assert abs(sampled - score) <= LOGPROB_TOLERANCE, (
                    f"a token was sampled with log-probability {sampled:.6f}, scoring it gives {score:.6f}"
                )


async def companions_do_not_change_a_greedy_answer(client: EngineClient) -> None:
    alone = [(await generate(client, prompt, temperature=0.0)).token_ids for prompt in PROMPTS]
    many = await asyncio.gather(*(generate(client, prompt, temperature=0.0) for prompt in PROMPTS * 4))
    for index, made in enumerate(many):
        expected = alone[index % len(PROMPTS)]
        assert made.token_ids == expected, f"{made.token_ids} in company, {expected} alone"


async def requests_with_other_seeds_are_sampled_otherwise(client: EngineClient) -> None:
    """The members of a group have the same prompt: one random stream for all of them would make them one."""
    made = await asyncio.gather(*(generate(client, PROMPTS[0], max_tokens=16, seed=seed) for seed in range(6)))
    different = {tuple(one.token_ids) for one in made}
    assert len(different) > 3, f"6 requests with different seeds gave {len(different)} different answers"


async def a_stop_token_ends_an_answer(client: EngineClient) -> None:
    free = await generate(client, PROMPTS[0], temperature=0.0)
    stop = free.token_ids[min(2, len(free.token_ids) - 1)]
    made = await generate(client, PROMPTS[0], temperature=0.0, stop=[stop])
    expected = free.token_ids[: free.token_ids.index(stop) + 1]
    assert made.token_ids == expected, f"stopping at {stop}, {made.token_ids} came, {expected} is expected"
    assert made.stop_reason == "stop", f"the stop reason is {made.stop_reason!r}"


async def pausing_holds_requests_and_resuming_finishes_them(client: EngineClient) -> None:
    await client.pause()
    await client.pause()
    assert (await client.health()).paused, "paused, health says it is not"
    waiting = asyncio.create_task(generate(client, PROMPTS[0]))
    await asyncio.sleep(QUIET_S)
    assert not waiting.done(), "a paused engine answered a request"
    await client.resume()
    await client.resume()
    async with asyncio.timeout(PATIENCE_S):
        check_generation(await waiting, 6, (await client.health()).version)
    assert not (await client.health()).paused, "resumed, health says it is paused"


async def a_cancelled_request_leaves_nothing_behind(client: EngineClient) -> None:
    await client.pause()
    running = [asyncio.create_task(generate(client, prompt)) for prompt in PROMPTS]
    await asyncio.sleep(QUIET_S)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.resume()
    async with asyncio.timeout(PATIENCE_S):
        while (await client.health()).load:
            await asyncio.sleep(0.05)
    check_generation(await generate(client, PROMPTS[1]), 6, (await client.health()).version)


async def weights_that_cannot_be_read_change_nothing(client: EngineClient) -> None:
    """The engine still holds exactly one whole version, and goes on."""
    before = await client.health()
    (scores,) = await client.score([PROMPTS[2]])
    await client.pause()
    try:
        await client.install(WeightsRef(before.version + 1, before.incarnation, "/nowhere/v_999999"))
    except PrlError as error:
        assert str(error), "it refused without a word"
    else:
        raise AssertionError("weights that do not exist were installed")
    finally:
        await client.resume()
    after = await client.health()
    assert (after.version, after.incarnation) == (before.version, before.incarnation), f"the version is {after.version}"
    (again,) = await client.score([PROMPTS[2]])
    assert again == scores, "the weights are no longer those from before"
    check_generation(await generate(client, PROMPTS[0]), 6, before.version)


# --- helpers ----------------------------------------------------------------------------------------------


async def generate(
    client: EngineClient,
    prompt: Sequence[int],
    *,
    temperature: float = 1.0,
    max_tokens: int = 6,
    stop: Sequence[int] = (),
    seed: int = 11,
) -> Generation:
    request = GenerateRequest(
        id=f"contract-{next(_ids)}",
        token_ids=list(prompt),
        sampling=Sampling(max_tokens, temperature),
        stop_token_ids=list(stop),
        seed=seed,
        deadline_s=PATIENCE_S,
    )
    return await client.generate(request)


def check_generation(made: Generation, max_tokens: int, version: int) -> None:
    count = len(made.token_ids)
    assert 1 <= count <= max_tokens, f"{count} tokens, at most {max_tokens} were asked for"
    assert len(made.logprobs) == len(made.versions) == count, (
        f"{count} tokens, {len(made.logprobs)} log-probabilities, {len(made.versions)} versions"
    )
    assert all(math.isfinite(value) and value <= 1e-4 for value in made.logprobs), f"log-probabilities {made.logprobs}"
    assert set(made.versions) == {version}, f"sampled under version {version}, the tokens say {made.versions}"
    assert made.stop_reason in ("stop", "length"), f"the stop reason is {made.stop_reason!r}"
    if made.stop_reason == "length":
        assert count == max_tokens, f"it stopped for length after {count} of {max_tokens} tokens"


CHECKS = [its_role_is_complete]
CLIENT_CHECKS: list[Callable[[EngineClient], Awaitable[None]]] = [
    every_token_has_its_logprob_and_version,
    logprobs_are_those_of_the_model,
    companions_do_not_change_a_greedy_answer,
    requests_with_other_seeds_are_sampled_otherwise,
    a_stop_token_ends_an_answer,
    pausing_holds_requests_and_resuming_finishes_them,
    a_cancelled_request_leaves_nothing_behind,
    weights_that_cannot_be_read_change_nothing,
]
