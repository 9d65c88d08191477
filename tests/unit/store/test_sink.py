"""The loop's sink: a group becomes one record per member, each with its own fate and its own credit."""

from __future__ import annotations

from collections.abc import Callable

from prl.loop.groups import Failure, Group, Sample
from prl.rundir import RunDir
from prl.store import RolloutRecord, StoreWriter, open_run
from prl.store.sink import RunSink, group_records
from prl.types import Credit, Outcome, RolloutHeader, Task

MakeRecord = Callable[..., RolloutRecord]


def make_group(make_record: MakeRecord) -> Group:
    """Member 0 has two samples of which the second carries a signal, member 1 has none, member 2 failed."""
    outcomes = {}
    for index, episode_id in enumerate((70, 71)):
        record = make_record(episode_id, (3, 2), (None, None))
        outcomes[index] = Outcome(episode_id, record.rollouts, record.bodies, {}, 0.1, record.transcript)
    credit = Credit(((2, 1.5),), ((2, 1.0),))
    sample = Sample(70, outcomes[0].rollouts[0].samples[1], credit, bytes(outcomes[0].bodies[1]))
    return Group(5, "echo", Task("t"), 3, 0, 1, 0, outcomes, {2: Failure("env_error", "boom")}, [sample])


def test_every_member_with_its_own_fate(make_record: MakeRecord) -> None:
    records = list(group_records(make_group(make_record), 4, "trained"))
    assert [(r.episode_id, r.status, r.error) for r in records] == [
        (70, "trained", ""),
        (71, "dropped", "no_signal"),
        (None, "failed", "env_error: boom"),
    ]
    assert [credit and credit.advantages for credit in records[0].credits] == [None, ((2, 1.5),)]


def test_a_dropped_group_says_why(make_record: MakeRecord) -> None:
    records = list(group_records(make_group(make_record), None, "stale"))
    assert [(r.status, r.error) for r in records[:2]] == [("dropped", "stale")] * 2


def test_through_the_writer(run_dir: RunDir, writer: StoreWriter, make_record: MakeRecord) -> None:
    sink = RunSink(writer)
    sink.group(make_group(make_record), 4, "trained")
    sink.metrics(4, {"loss": 1.0})
    sink.event("step", step=4)
    sink.seal(4)
    writer.flush()
    table = open_run(run_dir.path).rollouts(4)
    assert table["status"].to_pylist() == ["trained", "dropped", "failed"]
    assert table["advantages"].to_pylist() == [[0, 0, 0, 1.5, 1.5], None, None]


def test_agents_that_are_not_trained_get_no_credit(make_record: MakeRecord) -> None:
    record = make_record(1, (3, 2), (None, None))
    first, second = record.rollouts[0].samples
    rollouts = (RolloutHeader("judge", False, None, {}, (first,)), RolloutHeader("policy", True, 1.0, {}, (second,)))
    credit = Credit(((2, 1.5),), ((2, 1.0),))
    group = Group(
        5,
        "echo",
        Task("t"),
        1,
        0,
        1,
        outcomes={0: Outcome(1, rollouts, record.bodies)},
        samples=[Sample(1, second, credit, record.bodies[1])],
    )
    (made,) = group_records(group, 4, "trained")
    assert made.credits == [credit]
