"""grpo: the properties of a group baseline, and the credit streams the trainer unfolds."""

from __future__ import annotations

import math
import random

import pytest

from prl.errors import ConfigError
from prl.protocols import GroupMember
from prl.types import Credit, Reward, RolloutHeader, Runs, SampleHeader
from prl_algorithms.config import GrpoConfig, LengthPenalty
from prl_algorithms.grpo import Grpo, centred


def sample(*runs: tuple[int, int], tokens: int) -> SampleHeader:
    return SampleHeader(tokens, runs, 0, 0)


def rollout(
    reward: float | None, *samples: SampleHeader, agent: str = "policy", trainable: bool = True
) -> RolloutHeader:
    rewards = {"reward": None if reward is None else Reward(reward)}
    return RolloutHeader(agent, trainable, reward, rewards, samples or (sample((4, 6), tokens=10),))


def group(*rewards: float | None) -> list[GroupMember]:
    return [GroupMember(index, (rollout(reward),), {}) for index, reward in enumerate(rewards)]


def unfold(stream: Runs, tokens: int) -> list[float]:
    values = [value for length, value in stream for _ in range(length)]
    assert len(values) in (0, tokens), "a stream adds up to the sample's length, or is empty"
    return values or [0.0] * tokens


def advantages(credits: list[list[Credit]]) -> list[float]:
    return [member[0].advantages[0][1] if member[0].advantages else 0.0 for member in credits]


def grpo(**settings: object) -> Grpo:
    return Grpo(GrpoConfig(**settings))  # type: ignore[arg-type]


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group() -> None:
    credits = grpo().credit(group(1.0, 0.0, 0.0, 1.0))
    assert advantages(credits) == [0.5, -0.5, -0.5, 0.5]


def test_advantages_add_up_to_zero_and_follow_their_members() -> None:
    stream = random.Random(1)
    for _ in range(200):
        rewards = [stream.choice([0.0, 1.0, stream.gauss(0, 3)]) for _ in range(stream.randint(2, 16))]
        for settings in ({}, {"normalize_std": True}, {"length_penalty": LengthPenalty()}):
            values = advantages(grpo(**settings).credit(group(*rewards)))
            assert math.fsum(values) == pytest.approx(0.0, abs=1e-9)
            order = stream.sample(range(len(rewards)), len(rewards))
            shuffled = advantages(grpo(**settings).credit([group(*rewards)[index] for index in order]))
            assert shuffled == [values[index] for index in order], "exactly, so that arrival order cannot matter"


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -2.7, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_no_signal(reward: float, size: int) -> None:
    for settings in ({}, {"normalize_std": True}):
        credits = grpo(**settings).credit(group(*[reward] * size))
        assert all(credit.advantages == () for member in credits for credit in member)
        assert all(credit.rl for member in credits for credit in member)


def test_the_standard_deviation_is_divided_out_only_on_request() -> None:
    assert centred([0.0, 10.0]) == [-5.0, 5.0]
    assert centred([0.0, 10.0], normalize_std=True) == pytest.approx([-1.0, 1.0], rel=1e-5)


def test_a_rollout_has_one_advantage_and_weight_on_its_sampled_tokens_alone() -> None:
    turns = (sample((3, 2), (8, 4), tokens=12), sample((0, 1), (1, 2), (6, 0), tokens=7))
    members = [GroupMember(0, (rollout(1.0, *turns),), {}), GroupMember(1, (rollout(0.0),), {})]
    (first, second), _ = grpo().credit(members)
    assert unfold(first.rl, 12) == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert unfold(second.rl, 7) == [1, 1, 1, 0, 0, 0, 0]
    for credit, tokens in ((first, 12), (second, 7)):
        assert unfold(credit.advantages, tokens) == [0.5] * tokens
        assert credit.ce == () and credit.ref_kl == ()


def test_unscored_members_are_compared_with_nobody() -> None:
    credits = grpo().credit(group(1.0, None, 0.0))
    assert advantages(credits) == [0.5, 0.0, -0.5]
    assert credits[1] == [Credit()]
    assert grpo().credit(group(None, None)) == [[Credit()], [Credit()]]
    assert advantages(grpo().credit(group(None, 1.0))) == [0.0, 0.0]


def test_only_trainable_rollouts_get_credit_and_each_agent_has_its_own_baseline() -> None:
    def member(index: int, solver: float, judge: float, opponent: float) -> GroupMember:
        return GroupMember(
            index,
            (
                rollout(opponent, agent="opponent", trainable=False),
                rollout(solver, agent="solver"),
                rollout(judge, agent="judge"),
            ),
            {},
        )

    credits = grpo().credit([member(0, 1.0, 10.0, 99.0), member(1, 0.0, 30.0, -99.0)])
    assert [len(member) for member in credits] == [2, 2]
    assert [[credit.advantages[0][1] for credit in member] for member in credits] == [[0.5, -10.0], [-0.5, 10.0]]


def test_interleaved_groups_with_failures_have_their_own_baselines() -> None:
    """T21: members arrive out of order and mixed with another group's; of four one failed and one was cancelled."""
    algorithm = grpo()
    one, other = group(1.0, 0.0), group(100.0, 90.0, 110.0, 100.0)
    late_first = [one[1], one[0]]
    assert advantages(algorithm.credit(late_first)) == [-0.5, 0.5]
    assert advantages(algorithm.credit(other)) == [0.0, -10.0, 10.0, 0.0]
    assert advantages(algorithm.credit(late_first)) == [-0.5, 0.5], "nothing of another group is remembered"


def test_a_length_penalty_takes_a_share_of_the_mean_by_what_was_used() -> None:
    short, long = sample((4, 6), tokens=10), sample((2, 12), tokens=14)
    members = [GroupMember(0, (rollout(1.0, short),), {}), GroupMember(1, (rollout(1.0, long),), {})]
    penalty = LengthPenalty(output=0.4, input=0.1, turns=0.2)
    values = advantages(grpo(length_penalty=penalty).credit(members))
    shaped = [1 - (0.4 * 6 / 12 + 0.1 * 4 / 4 + 0.2), 1 - (0.4 * 12 / 12 + 0.1 * 2 / 4 + 0.2)]
    mean = sum(shaped) / 2
    assert values == pytest.approx([shaped[0] - mean, shaped[1] - mean])
    failed = [GroupMember(0, (rollout(-1.0, short),), {}), GroupMember(1, (rollout(-1.0, long),), {})]
    assert advantages(grpo(length_penalty=penalty).credit(failed)) == [0.0, 0.0], "length is no virtue of failures"


def test_a_group_of_one_says_what_to_change() -> None:
    assert Grpo.min_members == 2
    with pytest.raises(ConfigError, match=r"group of 1.*set loop\.group_size to 2 or more"):
        grpo().credit(group(1.0))


def test_it_keeps_no_state_and_refuses_another_algorithms() -> None:
    assert grpo().state() == {}
    grpo().load_state({})
    with pytest.raises(ConfigError, match="baseline"):
        grpo().load_state({"baseline": 0.5})
