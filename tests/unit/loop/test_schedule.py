"""The two rules behind the staleness guarantee, as properties of pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prl.loop.schedule import deadline, room, select


@dataclass
class Item:
    id: int
    deadline: int


def test_room_is_the_whole_window_at_rest_and_one_batch_less_while_training() -> None:
    assert room(0, batches=0, steps=100, version=0, groups_per_step=8, max_staleness=4) == 5 * 8
    assert room(0, batches=1, steps=100, version=0, groups_per_step=8, max_staleness=4) == 4 * 8


def test_synchronous_has_room_only_when_the_engines_are_up_to_date() -> None:
    assert room(0, batches=3, steps=10, version=3, groups_per_step=4, max_staleness=0) == 4
    assert room(4, batches=3, steps=10, version=3, groups_per_step=4, max_staleness=0) == 0
    assert room(0, batches=4, steps=10, version=3, groups_per_step=4, max_staleness=0) == 0


def test_nothing_is_admitted_that_no_step_is_left_for() -> None:
    assert room(0, batches=9, steps=10, version=9, groups_per_step=4, max_staleness=4) == 4
    assert room(0, batches=10, steps=10, version=10, groups_per_step=4, max_staleness=4) == 0


def test_deadline_is_the_last_step_within_staleness() -> None:
    step = deadline(min_version=3, max_staleness=2)
    assert (step - 1) - 3 == 2


def test_select_takes_the_earliest_deadlines_in_order_of_admission() -> None:
    ready = [Item(3, 6), Item(1, 5), Item(2, 6), Item(0, 7)]
    assert select(ready, [], 3, 2) == ([1, 2], [])
    assert select([Item(1, 9), Item(2, 6), Item(3, 7)], [], 3, 2) == ([2, 3], [])
    assert select([Item(5, 6), Item(4, 7), Item(3, 9)], [], 3, 2) == ([4, 5], [])


def test_select_waits_for_a_straggler_that_would_otherwise_be_too_stale() -> None:
    ready = [Item(1, 9), Item(2, 9)]
    straggler = Item(0, 5)
    assert select(ready, [straggler], 4, 2) == ([1, 2], [])
    assert select(ready, [straggler], 5, 2) == ([], [0])


def test_select_does_not_wait_when_there_is_nobody_to_wait_for() -> None:
    """A resume with a smaller K can leave more overdue groups than fit; waiting for nothing would hang."""
    overdue = [Item(i, 5) for i in range(6)]
    assert select(overdue, [], 5, 2) == ([0, 1], [])


@given(
    steps=st.integers(1, 12),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    choices=st.randoms(use_true_random=False),
)
def test_every_admitted_group_is_trained_in_time_and_the_run_never_stops(
    steps: int, groups_per_step: int, max_staleness: int, choices: object
) -> None:
    """Admit whenever there is room, finish groups in any order, train and publish at any time: nothing is late."""
    random = choices
    batches = trained = version = next_id = 0
    flying: list[Item] = []
    ready: list[Item] = []
    for _ in range(100_000):
        if trained == steps:
            break
        moves = []
        free = room(len(flying) + len(ready), batches, steps, version, groups_per_step, max_staleness)
        chosen, late = select(ready, flying, batches + 1, groups_per_step) if batches < steps else ([], [])
        if free > 0:
            moves.append("admit")
        if flying:
            moves.append("finish")
        if chosen and batches - trained < 2:
            moves.append("form")
        if trained < batches:
            moves.append("train")
        if version < trained:
            moves.append("publish")
        assert moves, "nothing can happen: a deadlock"
        assert not late or all(any(item.id == i for item in flying) for i in late)
        match random.choice(moves):  # type: ignore[attr-defined]
            case "admit":
                flying.append(Item(next_id, deadline(version, max_staleness)))
                next_id += 1
            case "finish":
                ready.append(flying.pop(random.randrange(len(flying))))  # type: ignore[attr-defined]
            case "form":
                batches += 1
                batch = [item for item in ready if item.id in chosen]
                assert all(item.deadline >= batches for item in batch), "trained too late"
                ready = [item for item in ready if item.id not in chosen]
            case "train":
                trained += 1
            case "publish":
                version = trained
        assert all(item.deadline > batches for item in flying + ready), "an outstanding group can never be trained"
    assert trained == steps
    assert next_id == steps * groups_per_step, "admitted more than the run can use"
