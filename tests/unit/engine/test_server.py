"""The engine behind its wire: generation, installing weights whole or not at all, pausing, losing it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from prl import faults
from prl.engine.backend import Result
from prl.engine.client import WireEngineClient
from prl.engine.server import EngineServer
from prl.errors import EpisodeFailed, WeightsError, WireError
from prl.faults import Fault
from prl.messages import Generation, Installed, WeightsRef
from prl.protocols import Probe, ReceivedWeights
from prl.wire import Server
from prl_engine_embedded.backend import EmbeddedBackend
from prl_engine_embedded.fixed import FixedScheduler
from prl_engine_embedded.weights import Swap

TOKEN = "t"


class Shelf:
    """A `ChannelReceiver` over whatever a test put into `versions`."""

    def __init__(self) -> None:
        self.versions: dict[int, ReceivedWeights | Exception] = {}

    def receive(self, weights: WeightsRef) -> ReceivedWeights:
        found = self.versions[weights.version]
        if isinstance(found, Exception):
            raise found
        return found


class World:
    """An engine behind a real wire, and a client of it."""

    def __init__(self, kit: Any, server: EngineServer, shelf: Shelf, address: str) -> None:
        self.kit, self.server, self.shelf, self.address = kit, server, shelf, address
        self.client = WireEngineClient(address, TOKEN)

    def put(self, version: int, seed: int, *, probes: bool = True, tolerance: float = 1e-4, **changes: Any) -> None:
        """Version `version`: the weights of `make_module(seed)` with `changes`, and probes of a plain forward."""
        module = self.kit.make_module(seed)
        tensors = {**{name: tensor.clone() for name, tensor in module.state_dict().items()}, **changes}
        del tensors["lm_head.weight"]  # tied: a checkpoint names it once
        sequences = [[1, 2, 3, 4, 5, 6], [7, 8, 9]] if probes else []
        scored = [Probe(ids, plain_score(module, ids)) for ids in sequences]
        self.shelf.versions[version] = ReceivedWeights(tensors, scored, tolerance)

    async def install(self, version: int, incarnation: int = 0) -> Installed:
        return await self.client.install(WeightsRef(version, incarnation, "shelf"))

    async def scores(self) -> list[float]:
        return (await self.client.score([[1, 2, 3, 4, 5, 6]]))[0]


def plain_score(module: Any, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float(), -1)
    return [0.0, *logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]


@asynccontextmanager
async def served(kit: Any) -> Any:
    shelf = Shelf()
    loaded = kit.load()
    engine = EngineServer(EmbeddedBackend(loaded, kit.track(FixedScheduler(loaded, 16, 8)), shelf))
    server = Server(TOKEN, engine.handlers())
    world = World(kit, engine, shelf, server.start())
    try:
        yield world
    finally:
        await world.client.close()
        server.close()
        engine.close()


def scenario(kit: Any, body: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), served(kit) as world:
            await body(world)

    asyncio.run(main())


def test_generate_score_and_health(kit: Any) -> None:
    async def body(world: World) -> None:
        requests = [kit.request(index) for index in range(30)]
        found = await asyncio.gather(*(world.client.generate(request) for request in requests))
        for request, generation in zip(requests, found):
            scored = (await world.client.score([request.token_ids + generation.token_ids]))[0]
            ours = torch.tensor(scored[len(request.token_ids) :])
            torch.testing.assert_close(ours, torch.tensor(generation.logprobs), atol=2e-5, rtol=0)
        health = await world.client.health()
        assert (health.version, health.paused, health.load) == (0, False, 0)
        assert health.busy > 0
        assert health.info["tokens"] == sum(len(generation.token_ids) for generation in found)
        with pytest.raises(EpisodeFailed) as caught:
            await world.client.generate(kit.request(99, prompt=[1] * 500))
        assert caught.value.reason == "context_full"

    scenario(kit, body)


def test_two_clients_may_use_the_same_ids(kit: Any) -> None:
    async def body(world: World) -> None:
        other = WireEngineClient(world.address, TOKEN)
        first, second = kit.request(1), kit.request(2)
        second.id = first.id
        a, b = await asyncio.gather(world.client.generate(first), other.generate(second))
        assert a.token_ids != b.token_ids
        await other.close()

    scenario(kit, body)


def test_install_changes_version_and_probabilities(kit: Any) -> None:
    async def body(world: World) -> None:
        before = await world.scores()
        world.put(1, seed=1)
        await world.install(1, incarnation=2)
        health = await world.client.health()
        assert (health.version, health.incarnation) == (1, 2)
        after = await world.scores()
        assert max(abs(a - b) for a, b in zip(before, after)) > 0.1
        expected = plain_score(kit.make_module(1), [1, 2, 3, 4, 5, 6])
        torch.testing.assert_close(torch.tensor(after), torch.tensor(expected))
        generation = await world.client.generate(kit.request(0))
        assert set(generation.versions) == {1}
        world.put(2, seed=0)
        await world.install(2, incarnation=2)
        assert await world.scores() == before

    scenario(kit, body)


def test_an_earlier_life_of_the_trainer_is_not_installed(kit: Any) -> None:
    """A message that was on its way while the trainer fell back to a checkpoint and was started again."""

    async def body(world: World) -> None:
        world.put(1, seed=1)
        world.put(7, seed=0)
        await world.install(1, incarnation=1)
        after = await world.scores()
        with pytest.raises(
            WeightsError, match="incarnation 0 of the trainer, and this engine has heard of incarnation 1"
        ):
            await world.install(7, incarnation=0)
        health = await world.client.health()
        assert (health.version, health.incarnation) == (1, 1) and await world.scores() == after

    scenario(kit, body)


def test_what_is_installed_is_acknowledged_again_and_not_read_again(kit: Any) -> None:
    """T13: the acknowledgement was lost. After an install that failed, the one before is read again when asked for."""

    async def body(world: World) -> None:
        world.put(1, seed=1)
        found = await world.install(1)
        assert found.probe_tokens == 5 + 2 and found.probe_kl < 1e-9 and found.probe_difference < 1e-4
        (read,) = (world.shelf.versions.pop(1),)
        assert await world.install(1) == found
        with pytest.raises(WeightsError):
            await world.install(2)
        with pytest.raises(WeightsError):
            await world.install(1)
        world.shelf.versions[1] = read
        await world.install(1)
        assert (await world.client.health()).version == 1

    scenario(kit, body)


BROKEN: dict[str, Callable[[World], None]] = {
    "the probes do not agree": lambda world: world.put(1, seed=1, **{"model.norm.weight": torch.full((32,), 0.9)}),
    "not a number|nan": lambda world: world.put(1, seed=1, **{"model.norm.weight": torch.full((32,), math.nan)}),
    "shape": lambda world: world.put(1, seed=1, **{"model.norm.weight": torch.ones(31)}),
    "unexpected extra": lambda world: world.put(1, seed=1, extra=torch.ones(1)),
    "checksum": lambda world: world.shelf.versions.update({1: WeightsError("a checksum is wrong")}),
    "No space": lambda world: world.shelf.versions.update({1: OSError(28, "No space left")}),
}


@pytest.mark.parametrize("match", sorted(BROKEN))
def test_a_bad_version_leaves_the_former_one_whole(kit: Any, match: str) -> None:
    async def body(world: World) -> None:
        before = await world.scores()
        BROKEN[match](world)
        running = [asyncio.create_task(world.client.generate(kit.request(i, max_tokens=80))) for i in range(16)]
        with pytest.raises(WeightsError, match=match):
            await world.install(1)
        assert (await world.client.health()).version == 0
        assert await world.scores() == before
        for generation in await asyncio.gather(*running):
            assert set(generation.versions) == {0}
        world.put(2, seed=1)
        await world.install(2)
        assert (await world.client.health()).version == 2

    scenario(kit, body)


def test_missing_weights_are_named(kit: Any) -> None:
    async def body(world: World) -> None:
        world.put(1, seed=1)
        received = world.shelf.versions[1]
        assert isinstance(received, ReceivedWeights)
        del received.tensors["model.layers.0.mlp.up_proj.weight"]  # type: ignore[attr-defined]
        with pytest.raises(WeightsError, match=r"missing model\.layers\.0\.mlp\.up_proj\.weight"):
            await world.install(1)

    scenario(kit, body)


def test_weights_named_as_in_files_are_loaded_as_files_are(kit: Any) -> None:
    """Experts are one tensor each on disk and one for all in memory."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=48, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    module, source = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
    files: dict[str, Any] = {}
    for name, tensor in source.state_dict().items():
        head, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, part in enumerate(tensor):
                gate, up = part.chunk(2)
                files |= {f"{head}.{expert}.gate_proj.weight": gate, f"{head}.{expert}.up_proj.weight": up}
        elif kind == "down_proj" and head.endswith("experts"):
            files |= {f"{head}.{expert}.down_proj.weight": part for expert, part in enumerate(tensor)}
        else:
            files[name] = tensor
    swap = Swap(module)
    swap.apply(swap.fitted(files))
    expected = source.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    del files["model.layers.0.mlp.experts.3.down_proj.weight"]
    with pytest.raises(WeightsError, match="experts"):
        swap.fitted(files)


def test_a_fault_in_the_middle_of_an_install_is_rolled_back(kit: Any) -> None:
    async def body(world: World) -> None:
        before = await world.scores()
        world.put(1, seed=1)
        faults.install("engine", plan=[Fault("engine", "engine.install", "error", at=1)])
        try:
            with pytest.raises(WeightsError, match="version 0 still is"):
                await world.install(1)
            assert await world.scores() == before
            await world.install(1)
            assert await world.scores() != before
        finally:
            faults.install("engine", plan=[])

    scenario(kit, body)


def test_a_fault_in_a_request_is_the_engine_s_not_the_episode_s(kit: Any) -> None:
    async def body(world: World) -> None:
        for point in ("engine.generate", "engine.decode"):
            faults.install("engine", plan=[Fault("engine", point, "error", at=1)])
            try:
                with pytest.raises(WireError):
                    await world.client.generate(kit.request(3, prompt=[1, 2], stops=[]))
            finally:
                faults.install("engine", plan=[])
            assert len((await world.client.generate(kit.request(3, stops=[]))).token_ids) == 12

    scenario(kit, body)


def test_prefixes_computed_before_an_install_do_not_serve_after_it(kit: Any) -> None:
    """T14: the same prompt gives what an engine that never had other weights gives."""

    async def body(world: World) -> None:
        requests = [kit.request(index) for index in range(20)]
        await asyncio.gather(*(world.client.generate(request) for request in requests))
        world.put(1, seed=1)
        await world.install(1)
        found = await asyncio.gather(*(world.client.generate(request) for request in requests))
        cold = kit.load()
        cold.module.load_state_dict(kit.make_module(1).state_dict())
        expected = await asyncio.to_thread(kit.fixed(cold).run, requests)
        assert [kit.exact(item) for item in found] == [kit.exact(item) for item in expected]

    scenario(kit, body)


def test_pause_and_resume_are_idempotent(kit: Any) -> None:
    async def body(world: World) -> None:
        await world.client.pause()
        await world.client.pause()
        turn = asyncio.create_task(world.client.generate(kit.request(0)))
        await asyncio.sleep(0.1)
        assert not turn.done()
        assert (await world.client.health()).paused
        world.put(1, seed=1)
        await world.install(1)
        await world.scores()
        assert not turn.done()
        await world.client.resume()
        await world.client.resume()
        assert set((await turn).versions) == {1}
        assert not (await world.client.health()).paused

    scenario(kit, body)


def test_cancelling_aborts(kit: Any) -> None:
    async def body(world: World) -> None:
        await world.client.pause()
        turns = [asyncio.create_task(world.client.generate(kit.request(i))) for i in range(30)]
        await asyncio.sleep(0.05)
        assert (await world.client.health()).load == 30
        for turn in turns:
            turn.cancel()
        await asyncio.sleep(0.05)
        await world.client.resume()
        while (await world.client.health()).load:
            await asyncio.sleep(0.01)
        assert (await world.client.health()).info["tokens"] == 0

    scenario(kit, body)


def test_a_log_probability_that_is_missing_spoils_one_answer_and_not_the_message(kit: Any) -> None:
    """T19: None, as an inference library may give it, becomes NaN, which the gateway refuses."""

    async def body(world: World) -> None:
        asked = [asyncio.create_task(world.client.generate(kit.request(number))) for number in range(2)]
        ids = [kit.request(number).id for number in range(2)]
        peer = await first_peer(world)
        spoiled = Generation([1, 2], [-0.5, None], [0, 0], "stop")  # type: ignore[list-item]
        fine = Generation([1], [-0.5], [0], "stop")
        world.server._answer([Result((peer, ids[0]), spoiled, None), Result((peer, ids[1]), fine, None)])
        first, second = await asyncio.gather(*asked)
        assert first.logprobs[0] == -0.5 and math.isnan(first.logprobs[1])
        assert second == fine

    async def first_peer(world: World) -> Any:
        peers: list[Any] = []
        add = world.server.backend.add
        world.server.backend.add = lambda requests: peers.extend(key[0] for key, _ in requests)  # type: ignore[method-assign]
        while not peers:
            await asyncio.sleep(0.01)
        world.server.backend.add = add  # type: ignore[method-assign]
        return peers[0]

    scenario(kit, body)
