"""The contract of an algorithm: one credit per trainable sample, streams that fit, state that survives a checkpoint."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence

from prl.protocols import Algorithm, GroupMember
from prl.types import Credit, Reward, RolloutHeader, Runs, SampleHeader

Make = Callable[[], Algorithm]
STREAMS = ("advantages", "rl", "ce", "ref_kl")


def it_says_how_many_members_it_needs(make: Make) -> None:
    least = make().min_members
    assert isinstance(least, int) and least >= 1, f"min_members is {least!r}, a count of at least 1 is expected"
    credits = make().credit(random_group(0, size=least))
    assert len(credits) == least, f"a group of min_members = {least} gave credits for {len(credits)} members"


def every_trainable_sample_has_one_credit(make: Make) -> None:
    for group in groups(make()):
        credits = make().credit(group)
        assert len(credits) == len(group), f"{len(group)} members, credits for {len(credits)}"
        for member, own in zip(group, credits, strict=True):
            samples = trainable(member)
            assert len(own) == len(samples), f"{len(samples)} trainable samples of a member, {len(own)} credits"
            assert all(isinstance(credit, Credit) for credit in own), "a credit is not a prl.types.Credit"


def streams_cover_their_samples(make: Make) -> None:
    for group in groups(make()):
        for member, own in zip(group, make().credit(group), strict=True):
            for header, credit in zip(trainable(member), own, strict=True):
                for name in STREAMS:
                    _check_stream(name, getattr(credit, name), header)


def different_rewards_give_a_signal(make: Make) -> None:
    group = [_member(index, [_rollout(reward, 5)]) for index, reward in enumerate((0.0, 1.0, 0.0, 1.0))]
    credits = [credit for own in make().credit(group) for credit in own]
    assert any(_trains(credit) for credit in credits), "no token of a group with different rewards has any weight"


def credit_depends_on_the_group_alone(make: Make) -> None:
    for group in groups(make()):
        first, second = make().credit(group), make().credit(group)
        assert first == second, "two fresh algorithms credited the same group differently"


def the_order_of_members_does_not_matter(make: Make) -> None:
    """Members arrive in whatever order their episodes ended."""
    for seed, group in enumerate(groups(make())):
        order = random.Random(seed).sample(range(len(group)), len(group))
        expected = make().credit(group)
        shuffled = make().credit([group[index] for index in order])
        for position, index in enumerate(order):
            assert _close(shuffled[position], expected[index]), (
                f"member {index} got another credit when the group arrived in the order {order}"
            )


def members_are_left_alone(make: Make) -> None:
    for group in groups(make()):
        before = copy.deepcopy(group)
        make().credit(group)
        assert group == before, "it changed the members it was given"


def state_survives_a_checkpoint(make: Make) -> None:
    """Through JSON, and an algorithm that continues from it does as the first one would have done."""
    original = make()
    history = groups(original)
    for group in history:
        original.credit(group)
    saved = json.loads(json.dumps(original.state()))
    restored = make()
    restored.load_state(saved)
    following = random_group(99, size=max(4, original.min_members))
    assert restored.credit(following) == original.credit(following), "after load_state it credits a group differently"
    assert json.loads(json.dumps(restored.state())) == json.loads(json.dumps(original.state())), "the states differ"


def groups(algorithm: Algorithm) -> list[list[GroupMember]]:
    """Groups of several sizes and shapes, the same every time."""
    return [random_group(seed, size=max(algorithm.min_members, 2 + seed)) for seed in range(7)]


def random_group(seed: int, size: int) -> list[GroupMember]:
    """Members with one to three agents, one to three samples each, some not trainable; all scored."""
    stream = random.Random(seed)
    seats = [("policy", True), ("other", True), ("fixed", False)][: 1 + seed % 3]
    return [
        _member(
            seed * 1000 + index,
            [
                _rollout(stream.choice([0.0, 1.0, stream.gauss(0, 1)]), stream.randint(1, 4), stream, agent, trained)
                for agent, trained in seats
            ],
        )
        for index in range(size)
    ]


def trainable(member: GroupMember) -> list[SampleHeader]:
    return [sample for rollout in member.rollouts if rollout.trainable for sample in rollout.samples]


def _member(episode_id: int, rollouts: Sequence[RolloutHeader]) -> GroupMember:
    return GroupMember(episode_id, tuple(rollouts), {"length": 1.0})


def _rollout(
    reward: float,
    turns: int,
    stream: random.Random | None = None,
    agent: str = "policy",
    trained: bool = True,
) -> RolloutHeader:
    stream = stream or random.Random(0)
    samples = []
    for _ in range(stream.randint(1, 3)):
        runs, position = [], 0
        for _ in range(turns):
            start = position + stream.randint(1, 6)
            length = stream.randint(1, 9)
            runs.append((start, length))
            position = start + length
        samples.append(SampleHeader(position + stream.randint(0, 2), tuple(runs), 3, 4))
    return RolloutHeader(agent, trained, reward, {"reward": Reward(reward)}, tuple(samples), num_turns=turns)


def _check_stream(name: str, stream: Runs, header: SampleHeader) -> None:
    covered = sum(length for length, _ in stream)
    assert covered in (0, header.num_tokens), (
        f"the stream {name!r} covers {covered} tokens of a sample of {header.num_tokens}: it must cover all, or none"
    )
    for length, value in stream:
        assert length > 0, f"the stream {name!r} has a run of {length} tokens"
        assert math.isfinite(value), f"the stream {name!r} holds {value}"
        assert name == "advantages" or value >= 0, f"the weight stream {name!r} holds {value}"


def _trains(credit: Credit) -> bool:
    def nonzero(stream: Runs) -> bool:
        return any(value for _, value in stream)

    policy = nonzero(credit.rl) and nonzero(credit.advantages)
    return policy or nonzero(credit.ce) or nonzero(credit.ref_kl)


def _close(some: Sequence[Credit], others: Sequence[Credit]) -> bool:
    return len(some) == len(others) and all(
        [length for length, _ in getattr(one, name)] == [length for length, _ in getattr(other, name)]
        and all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
            for (_, a), (_, b) in zip(getattr(one, name), getattr(other, name), strict=True)
        )
        for one, other in zip(some, others, strict=True)
        for name in STREAMS
    )


CHECKS = [
    it_says_how_many_members_it_needs,
    every_trainable_sample_has_one_credit,
    streams_cover_their_samples,
    different_rewards_give_a_signal,
    credit_depends_on_the_group_alone,
    the_order_of_members_does_not_matter,
    members_are_left_alone,
    state_survives_a_checkpoint,
]
