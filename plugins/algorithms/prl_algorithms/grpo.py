"""GRPO: a rollout's advantage is its reward minus the mean reward of its group.

    A_i = R_i - mean(R)                  constant over the sampled tokens of rollout i

(DeepSeekMath, arXiv 2402.03300, section 4.1; without the division by the standard deviation, which Dr. GRPO, arXiv
2503.20783, shows to be a bias.) With several agents each is compared with the same agent of the other members: two
sides of a game have different mean rewards.

With a length penalty the reward is first R_i - max(0, mean(R)) * (output * o_i / max o + input * i_i / max i + turns *
t_i / max t).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prl.errors import ConfigError
from prl.protocols import Algorithm, GroupMember
from prl.types import Credit, RolloutHeader, Runs, SampleHeader
from prl_algorithms.config import GrpoConfig, LengthPenalty

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it."""


class Grpo:
    """Stateless: `state` is empty, and every group stands for itself, whatever else is in flight."""

    min_members = GrpoConfig.min_members

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    def credit(self, members: Sequence[GroupMember]) -> list[list[Credit]]:
        """One list per member, one `Credit` per sample of its trainable rollouts, in order.

        A rollout that was not scored (reward None) is compared with nobody and gets empty credits.

        Raises:
            ConfigError: a group of one.
        """
        if len(members) < self.min_members:
            raise ConfigError(
                [
                    f"the algorithm 'grpo' was given a group of {len(members)}: it compares the members of a group and "
                    f"needs at least {self.min_members}; set loop.group_size to {self.min_members} or more (8 is usual)"
                ]
            )
        advantages = self._advantages(members)
        return [
            [
                _credit(sample, advantages.get((index, seat)))
                for seat, rollout in enumerate(member.rollouts)
                if rollout.trainable
                for sample in rollout.samples
            ]
            for index, member in enumerate(members)
        ]

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises:
        ConfigError: the checkpoint was written with another algorithm.
        """
        if state:
            raise ConfigError(
                [
                    f"the checkpoint holds algorithm state ({', '.join(sorted(state))}), but 'grpo' keeps none: it was "
                    "written with another algorithm; set algorithm.use to that one, or start a new run"
                ]
            )

    def _advantages(self, members: Sequence[GroupMember]) -> dict[tuple[int, int], float]:
        """The advantage of every scored trainable rollout, by (member, seat)."""
        seats: dict[str, list[tuple[int, int]]] = {}
        for index, member in enumerate(members):
            for seat, rollout in enumerate(member.rollouts):
                if rollout.trainable and rollout.reward is not None:
                    seats.setdefault(rollout.agent, []).append((index, seat))
        advantages: dict[tuple[int, int], float] = {}
        for places in seats.values():
            rollouts = [members[index].rollouts[seat] for index, seat in places]
            rewards = [rollout.reward or 0.0 for rollout in rollouts]
            if self.config.length_penalty is not None:
                rewards = penalised(rewards, rollouts, self.config.length_penalty)
            advantages.update(zip(places, centred(rewards, normalize_std=self.config.normalize_std), strict=True))
        return advantages


def centred(rewards: Sequence[float], *, normalize_std: bool = False) -> list[float]:
    """Rewards minus their mean, exactly 0 where all are equal: rounding must not pass for a signal.

    `math.fsum` makes the mean independent of the order in which members arrived.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    values = [reward - mean for reward in rewards]
    if normalize_std:
        std = math.sqrt(math.fsum(value * value for value in values) / len(values))
        values = [value / (std + STD_FLOOR) for value in values]
    return values


def penalised(rewards: Sequence[float], rollouts: Sequence[RolloutHeader], penalty: LengthPenalty) -> list[float]:
    """Each reward minus its share of the mean reward, by what its rollout used of the group's most.

    A mean below 0 counts as 0: taking a share of it would reward length.
    """
    mean = max(0.0, math.fsum(rewards) / len(rewards))
    shares = [0.0] * len(rewards)
    for weight, used in zip((penalty.output, penalty.input, penalty.turns), zip(*map(_usage, rollouts)), strict=True):
        most = max(used)
        if most > 0:
            shares = [share + weight * amount / most for share, amount in zip(shares, used, strict=True)]
    return [reward - mean * share for reward, share in zip(rewards, shares, strict=True)]


def _usage(rollout: RolloutHeader) -> tuple[int, int, int]:
    """Sampled tokens, given tokens, and turns over all samples of a rollout."""
    sampled = sum(sample.num_sampled for sample in rollout.samples)
    given = sum(sample.num_tokens for sample in rollout.samples) - sampled
    return sampled, given, sum(len(sample.runs) for sample in rollout.samples)


def _credit(sample: SampleHeader, advantage: float | None) -> Credit:
    if advantage is None:
        return Credit()
    return Credit(advantages=((sample.num_tokens, advantage),) if advantage else (), rl=sampled_stream(sample))


def sampled_stream(sample: SampleHeader) -> Runs:
    """1 on sampled tokens, 0 elsewhere, as run lengths that add up to `num_tokens`."""
    stream: list[tuple[int, float]] = []
    position = 0
    for start, length in sample.runs:
        if start > position:
            stream.append((start - position, 0.0))
        if length:
            stream.append((length, 1.0))
        position = start + length
    if position < sample.num_tokens:
        stream.append((sample.num_tokens - position, 0.0))
    return tuple(stream)


def build(config: GrpoConfig) -> Algorithm:
    return Grpo(config)
