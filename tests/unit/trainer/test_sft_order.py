"""Which rows a step trains: epochs, shuffling, and several sources by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.errors import ConfigError
from prl_trainer_fsdp.sft.order import Draw, Order


def rows(order: Order, steps: int) -> list[Draw]:
    return [draw for step in range(1, steps + 1) for draw in order.step(step)]


def test_epochs_follow_one_another() -> None:
    plain = Order([5], [0], 4, 0, shuffle=False)
    assert [[draw.row for draw in plain.step(step)] for step in (1, 2)] == [[0, 1, 2, 3], [4, 0, 1, 2]]
    order = Order([5], [0], 4, 7, shuffle=True)
    shuffled = [draw.row for draw in rows(order, 5)]
    epochs = [shuffled[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and len(set(map(tuple, epochs))) > 1
    assert shuffled == [draw.row for draw in rows(Order([5], [0], 4, 7, shuffle=True), 5)]


def test_a_step_is_the_same_whatever_came_before() -> None:
    whole, fresh = (Order([7, 4], [1, 2], 3, 1, shuffle=True) for _ in range(2))
    steps = [whole.step(step) for step in range(1, 30)]
    assert fresh.step(17) == steps[16] and fresh.step(2) == steps[1]


def test_without_weights_an_epoch_holds_every_row_once() -> None:
    for shuffle in (False, True):
        order = Order([3, 6], [0, 0], 9, 0, shuffle=shuffle)
        for step in (1, 2):
            assert sorted(order.step(step)) == [Draw(0, i) for i in range(3)] + [Draw(1, i) for i in range(6)]
    even = [draw.source for draw in Order([3, 6], [0, 0], 9, 0, shuffle=False).step(1)]
    assert even == [1, 0, 1, 1, 0, 1, 1, 0, 1], "interleaved evenly"


@pytest.mark.parametrize("shuffle", [False, True])
def test_with_weights_every_source_has_its_share_and_goes_through_its_rows(shuffle: bool) -> None:
    order = Order([10, 30], [3, 1], 40, 5, shuffle=shuffle)
    drawn = [draw for step in range(1, 5) for draw in order.step(step)]
    assert Counter(draw.source for draw in drawn) == {0: 120, 1: 40}
    assert Counter(draw.row for draw in drawn if draw.source == 0) == dict.fromkeys(range(10), 12)
    first = [draw.row for draw in drawn if draw.source == 1][:30]
    assert sorted(first) == list(range(30)) if not shuffle else set(first) <= set(range(30))


def test_epochs_end_in_a_shorter_step() -> None:
    order = Order([7], [0], 4, 0, shuffle=True, epochs=2)
    assert order.steps == 4 and [len(order.step(step)) for step in range(1, 5)] == [4, 4, 4, 2]
    assert [order.epoch(step) for step in (0, 1, 4)] == [0, 4 / 7, 2.0]


def test_a_share_below_one_example_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.train.1.weight: a share of 0.001 of an epoch of 20"):
        Order([10, 10], [1, 0.001], 4, 0, shuffle=False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 7), st.integers(0, 3), st.booleans(), st.booleans(),
)  # fmt: skip
def test_any_order_is_balanced(
    sources: list[tuple[int, int]], batch: int, seed: int, shuffle: bool, weighted: bool
) -> None:
    """Over a source's whole passes each of its rows comes equally often, give or take the pass that has begun."""
    sizes = [size for size, _ in sources]
    try:
        order = Order(sizes, [weight * weighted for _, weight in sources], batch, seed, shuffle=shuffle)
    except ConfigError:
        return
    epochs = 3
    drawn = rows(order, epochs * sum(sizes))[: epochs * sum(sizes)]
    counts = Counter(drawn)
    for source, size in enumerate(sizes):
        of_source = [counts[Draw(source, row)] for row in range(size)]
        assert max(of_source) - min(of_source) <= 1
