from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.loop.ledger import Ledger


@given(st.lists(st.tuples(st.sampled_from(["dispatch", "train", "drop", "fail"]), st.integers(0, 5))))
def test_the_counts_always_add_up(moves: list[tuple[str, int]]) -> None:
    ledger = Ledger()
    for move, number in moves:
        if move == "dispatch":
            ledger.dispatch(number)
        else:
            number = min(number, ledger.pending)
            {"train": ledger.train, "drop": lambda n: ledger.drop("x", n), "fail": lambda n: ledger.fail("y", n)}[move](
                number
            )
        counts = ledger.counts()
        settled = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["failed"].values())
        assert counts["dispatched"] == settled + counts["pending"]
    assert Ledger.from_counts(ledger.counts()).counts() == ledger.counts()


def test_an_episode_cannot_end_twice() -> None:
    ledger = Ledger()
    ledger.dispatch(2)
    ledger.train(2)
    with pytest.raises(AssertionError):
        ledger.drop("stale")
