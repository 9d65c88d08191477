"""Which engine gets which turn, whatever the engines do: fairness, affinity, and every turn answered exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import strategies as st

from prl.errors import WireError
from prl.loop.episodes import stream
from prl.messages import EngineAddress, EngineHealth, GenerateRequest, Generation, Installed, WeightsRef
from prl.testing import clock
from prl.testing.fake_engine import FakeEngine
from prl.types import Sampling
from prl_gateway.router import AFFINITY_SLACK, Router

PROPERTY = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)


@dataclass
class Owner:
    """A conversation."""

    engine: Any = None
    turns: list[Generation] = field(default_factory=list)


class Engine:
    """Takes `seconds` a turn, and fails the turns (by number) in `fails`: at once, or after they were computed."""

    def __init__(self, seconds: float, fails: dict[int, bool]) -> None:
        self.seconds, self.fails = seconds, fails
        self.begun: list[str] = []
        self.load = self.most = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        number = len(self.begun)
        self.begun.append(request.id)
        self.load += 1
        self.most = max(self.most, self.load)
        try:
            if self.fails.get(number) is False:
                raise WireError("refused")
            await asyncio.sleep(self.seconds)
            if self.fails.get(number):
                raise WireError("the connection is lost")
            return Generation([int(request.id)], [-0.5], [0], "stop")
        finally:
            self.load -= 1

    async def health(self) -> EngineHealth:
        return EngineHealth(0, 0, False, self.load, 0.0)

    async def install(self, weights: WeightsRef) -> Installed:
        return Installed()

    async def close(self) -> None: ...


def request(number: int, *, seed: int = 0, max_tokens: int = 1) -> GenerateRequest:
    return GenerateRequest(str(number), [1, 2], Sampling(max_tokens), [], seed, 1000.0)


def addresses(count: int) -> list[EngineAddress]:
    return [EngineAddress(replica, str(replica), 0) for replica in range(count)]


@PROPERTY
@hypothesis.given(
    seconds=st.lists(st.floats(0.01, 5), min_size=1, max_size=4),
    fails=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.booleans()), max_size=12),
    turns=st.lists(st.tuples(st.integers(0, 11), st.floats(0, 3)), min_size=1, max_size=50),
    changes=st.lists(st.tuples(st.floats(0, 60), st.integers(1, 4)), max_size=4),
)
def test_every_turn_is_answered_once_however_engines_come_go_and_fail(
    seconds: list[float],
    fails: list[tuple[int, int, bool]],
    turns: list[tuple[int, float]],
    changes: list[tuple[float, int]],
) -> None:
    async def main() -> None:
        engines = [
            Engine(own, {number: late for replica, number, late in fails if replica == index})
            for index, own in enumerate(seconds)
        ]
        router = Router(lambda address: engines[int(address)])  # type: ignore[arg-type, return-value]
        router.set(addresses(len(engines)))
        owners = [Owner() for _ in range(12)]
        locks = [asyncio.Lock() for _ in owners]

        async def turn(number: int, owner: int, begins: float) -> None:
            await asyncio.sleep(begins)
            async with locks[owner]:
                owners[owner].turns.append(await router.generate(owners[owner], request(number)))

        async def change(at: float, count: int) -> None:
            await asyncio.sleep(at)
            router.set(addresses(min(count, len(engines))))

        await asyncio.gather(
            *(turn(number, *one) for number, one in enumerate(turns)), *(change(*one) for one in changes)
        )
        answered = Counter(token for owner in owners for made in owner.turns for token in made.token_ids)
        assert answered == Counter(range(len(turns))), "each turn once"
        assert router.in_flight == 0
        begun = Counter(name for engine in engines for name in engine.begun)
        assert sum(begun.values()) == len(turns) + router.retries
        await router.close()

    clock.run(main())


@PROPERTY
@hypothesis.given(
    count=st.integers(1, 6), conversations=st.integers(1, 120), turns=st.integers(1, 3), seconds=st.floats(0.1, 3)
)
def test_load_is_shared_and_a_conversation_stays_where_it_is(
    count: int, conversations: int, turns: int, seconds: float
) -> None:
    """Equal engines: no two ever differ by more than the slack, and first turns by more than one."""

    async def main() -> None:
        engines = [Engine(seconds, {}) for _ in range(count)]
        router = Router(lambda address: engines[int(address)])  # type: ignore[arg-type, return-value]
        router.set(addresses(count))
        widest = 0
        moved = 0

        async def converse(number: int) -> None:
            nonlocal widest, moved
            owner = Owner()
            home = None
            for index in range(turns):
                await router.generate(owner, request(number * 10 + index))
                moved += home is not None and owner.engine is not home
                home = owner.engine
                loads = [engine.load for engine in engines]
                widest = max(widest, max(loads) - min(loads))

        await asyncio.gather(*(converse(number) for number in range(conversations)))
        firsts = [sum(name.endswith("0") for name in engine.begun) for engine in engines]
        assert max(firsts) - min(firsts) <= 1, firsts
        assert widest <= AFFINITY_SLACK + 1 and moved == 0
        await router.close()

    clock.run(main())


def test_one_after_another_is_shared_too() -> None:
    async def main() -> None:
        engines = [Engine(0.1, {}) for _ in range(3)]
        router = Router(lambda address: engines[int(address)])  # type: ignore[arg-type, return-value]
        router.set(addresses(3))
        for number in range(9):
            await router.generate(Owner(), request(number))
        assert [len(engine.begun) for engine in engines] == [3, 3, 3]

    clock.run(main())


class Unlucky(FakeEngine):
    """Loses its connection after it has computed its first turn."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Generation] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        self.made.append(await super().generate(request))
        if len(self.made) == 1:
            raise WireError("the connection is lost")
        return self.made[-1]


def test_replicas_with_one_seed_sample_different_answers_and_a_retry_is_not_another_one() -> None:
    """T26: the random stream is the request's, not the engine's."""

    async def main() -> None:
        unlucky = Unlucky()
        engines = [unlucky, FakeEngine()]
        router = Router(lambda address: engines[int(address)])
        router.set(addresses(2))
        made = []
        for index in range(32):
            asked = request(index, seed=stream(3, "train", index // 8, index % 8, 0), max_tokens=12)
            made.append(await router.generate(Owner(), asked))
        assert router.retries == 1
        assert len({tuple(one.token_ids) for one in made}) == 32, "no two requests got the same answer"
        assert unlucky.made[0] == made[0], "what another engine gave for the same request is the same"

    clock.run(main())
