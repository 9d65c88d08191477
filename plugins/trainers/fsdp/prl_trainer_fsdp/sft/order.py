"""Which rows a step trains: a pure function of its number.

An epoch has as many examples as the sources have rows together. Without weights it holds each row once. With weights
each source has its share of every epoch, and goes through its own rows again and again, in passes.

Without shuffling one source comes in the order of its rows, and several are interleaved evenly. With shuffling every
epoch has an order of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prl.errors import ConfigError

KEPT_EPOCHS = 2
"""Epochs whose order is kept: a step touches two at a bound."""


class Draw(NamedTuple):
    source: int
    row: int


class Order:
    """Args:
        sizes: rows of each source.
        weights: shares of each, in any unit; all 0 gives every row the same share.
        epochs: ends after so many, with a shorter last step; 0 never ends.

    Raises:
        ConfigError: a source's share of an epoch is less than one example.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        *,
        shuffle: bool,
        epochs: int = 0,
    ) -> None:
        self.epoch_size = sum(sizes)
        self.batch_size = batch_size
        self._sizes = list(sizes)
        self._counts = shares(sizes, weights)
        self._weighted = any(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._end = epochs * self.epoch_size
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    @property
    def steps(self) -> int:
        """Until the last epoch ends; 0 without an end."""
        return -(-self._end // self.batch_size)

    def epoch(self, step: int) -> float:
        """Epochs that are through after a step."""
        reached = step * self.batch_size
        return (min(reached, self._end) if self._end else reached) / self.epoch_size

    def step(self, step: int) -> list[Draw]:
        """The examples of a step, counted from 1."""
        first = (step - 1) * self.batch_size
        last = min(first + self.batch_size, self._end) if self._end else first + self.batch_size
        draws = []
        for position in range(first, last):
            sources, rows = self._epoch(position // self.epoch_size)
            at = position % self.epoch_size
            draws.append(Draw(int(sources[at]), int(rows[at])))
        return draws

    def _epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if epoch not in self._epochs:
            while len(self._epochs) >= KEPT_EPOCHS:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._arranged(epoch)
        return self._epochs[epoch]

    def _arranged(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and row of every example of an epoch, i64[epoch_size] each."""
        sources = np.repeat(np.arange(len(self._sizes)), self._counts)
        rows = np.concatenate([self._rows(source, epoch) for source in range(len(self._sizes))])
        if self._shuffle:
            places = np.random.default_rng([self._seed, epoch]).permutation(self.epoch_size)
        else:
            spread = [(np.arange(count) + 0.5) / max(count, 1) for count in self._counts]
            places = np.argsort(np.concatenate(spread), kind="stable")
        return sources[places], rows[places]

    def _rows(self, source: int, epoch: int) -> NDArray[np.int64]:
        """Its rows of an epoch, in the order of its passes."""
        size, count = self._sizes[source], self._counts[source]
        draws = np.arange(epoch * count, (epoch + 1) * count)
        passes, rows = draws // size, draws % size
        if self._shuffle and self._weighted:
            for number in np.unique(passes):
                mine = passes == number
                rows[mine] = np.random.default_rng([self._seed, source, int(number), 1]).permutation(size)[rows[mine]]
        return rows


def shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Examples of each source in an epoch: proportional, and with the largest remainders rounded up."""
    total = sum(sizes)
    if not any(weights):
        return list(sizes)
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    for index, count in enumerate(counts):
        if not count:
            raise ConfigError(
                [
                    f"data.train.{index}.weight: a share of {weights[index] / sum(weights):.2g} of an epoch of {total} "
                    f"examples is less than one of them: raise it"
                ]
            )
    return counts
