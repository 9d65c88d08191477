"""The ledger: each dispatched training episode ends in exactly one of trained, dropped, failed, or pending.

Evaluation episodes are counted apart and never enter here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Ledger:
    """Counts of training episodes. Each dispatched one is settled once, by `train`, `drop` or `fail`; at every step

    dispatched == trained + sum(dropped) + sum(failed) + pending
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        return self.dispatched - self.trained - self.dropped.total() - self.failed.total()

    def dispatch(self, episodes: int) -> None:
        self.dispatched += episodes

    def train(self, episodes: int) -> None:
        self._take(episodes)
        self.trained += episodes

    def drop(self, reason: str, episodes: int = 1) -> None:
        self._take(episodes)
        if episodes:
            self.dropped[reason] += episodes

    def fail(self, reason: str, episodes: int = 1) -> None:
        self._take(episodes)
        if episodes:
            self.failed[reason] += episodes

    def _take(self, episodes: int) -> None:
        assert 0 <= episodes <= self.pending, f"{episodes} episodes settled, {self.pending} pending"

    def counts(self) -> dict[str, Any]:
        """As it stands in status.json and summary.json."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "failed": dict(self.failed),
            "pending": self.pending,
        }

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> Ledger:
        ledger = cls()
        ledger.dispatched = counts["dispatched"]
        ledger.trained = counts["trained"]
        ledger.dropped = Counter(counts["dropped"])
        ledger.failed = Counter(counts["failed"])
        assert ledger.pending == counts["pending"], "a ledger that does not add up"
        return ledger
