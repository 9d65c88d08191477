"""A run that is resumed under another configuration: other bounds, other sizes, an environment that is gone."""

from __future__ import annotations

import msgspec

from prl.loop import snapshot
from prl.loop.groups import Failure, Group
from prl.loop.train import group_metrics
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, fake_config, fake_state
from prl.types import Outcome, Reward, RolloutHeader, Task

from .helpers import World


class Changing(World):
    """Every restart changes some of what decides how much is in flight, and how old it may be."""

    def start(self):  # type: ignore[no-untyped-def]
        if self.saved:
            choices = {
                "max_staleness": [0, 1, 2, 4],
                "groups_per_step": [1, 2, 4],
                "group_size": [2, 3, 4],
                "straggler": ["wait", "drop"],
                "max_concurrency": [0, 1, 5],
                "max_attempts": [1, 3],
            }
            update = {key: self.random.choice(values) for key, values in choices.items() if self.random.random() < 0.5}
            self.config = self.config.model_copy(update={"loop": self.config.loop.model_copy(update=update)})
        return super().start()


def test_another_bound_or_another_size_after_a_restart_breaks_nothing() -> None:
    """The bound of today holds, no episode id is given twice (so none is trained twice), no schedule hangs."""
    for seed in range(400):
        world = Changing(seed)
        saving = world.config.checkpoint.model_copy(update={"every": 1})
        world.config = world.config.model_copy(update={"checkpoint": saving})
        state = clock.run(world.run(kills=3), limit_s=1e6)
        assert state.version == world.config.loop.steps
        counts = state.ledger.counts()
        settled = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["failed"].values())
        assert counts["dispatched"] == settled + counts["pending"], f"seed {seed}"


def test_what_was_in_flight_in_an_environment_that_is_gone_is_dropped() -> None:
    fleet = FakeFleet()
    state = fake_state(fake_config(), runner=FakeRunner(fleet), fleet=fleet)
    state.ledger.dispatch(4)
    state.ledger.fail("env_error")
    gone = Group(0, "former", Task("a"), 2, 0, 3, failures={1: Failure("env_error")})
    state.in_flight = {0: gone, 1: Group(1, "fake", Task("b"), 2, 0, 3)}
    again = fake_state(fake_config())
    data = msgspec.msgpack.decode(snapshot.take(state, None, None), type=snapshot.Snapshot)
    data.tasks.redraw = [(3, "former", Task("a"), 1), (4, "fake", Task("c"), 1)]
    snapshot.restore(again, msgspec.msgpack.encode(data))
    assert list(again.in_flight) == [1]
    assert again.ledger.counts()["dropped"] == {"environment_removed": 1} and again.ledger.pending == 2
    again.tasks.put_back(5, "former", Task("a"), 1)
    assert clock.run(again.tasks.draw()) == ("fake", Task("c"), 1)
    assert clock.run(again.tasks.draw())[0] == "fake"


def test_metrics_do_not_depend_on_the_order_in_which_episodes_ended() -> None:
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1: a repeatable run must add in one order."""

    def outcome(index: int, reward: float) -> Outcome:
        rollout = RolloutHeader("policy", True, reward, {"reward": Reward(reward)}, ())
        return Outcome(index, (rollout,), [], {"measured": reward})

    outcomes = {index: outcome(index, reward) for index, reward in enumerate([0.1, 0.2, 0.3])}
    results = []
    for order in ([0, 1, 2], [2, 1, 0]):
        group = Group(0, "fake", Task("a"), 3, 0, 1, outcomes={index: outcomes[index] for index in order})
        results.append(group_metrics([group]))
    assert results[0] == results[1]
