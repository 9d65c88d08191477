"""A checkpoint is written while training goes on: on virtual time, with a disk that takes longer than a step."""

from __future__ import annotations

import asyncio

import pytest

from prl.errors import RunFailed, StoreError
from prl.loop import snapshot
from prl.loop.state import LoopState
from prl.loop.supervisor import Loop
from prl.testing import clock
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state

STEP_S = 1.0


class Disk:
    """Where checkpoints go: each takes `seconds`, and is there only at the end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.saved: dict[int, bytes] = {}
        self.writing: list[tuple[int, float, float]] = []

    async def save(self, step: int, data: bytes) -> None:
        started = asyncio.get_running_loop().time()
        await asyncio.sleep(self.seconds)
        self.writing.append((step, started, asyncio.get_running_loop().time()))
        self.saved[step] = data


def make(every: int, steps: int = 12, **loop: int) -> LoopState:
    config = fake_config(steps=steps, **loop)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": every})})
    fleet = FakeFleet()
    return fake_state(config, runner=FakeRunner(fleet), trainer=FakeTrainer(lambda: STEP_S), fleet=fleet)


def test_training_goes_on_and_the_next_checkpoint_waits() -> None:
    async def main() -> tuple[float, Disk, LoopState]:
        disk, state = Disk(2.5), make(every=4)
        await Loop(state, disk.save).run()
        return asyncio.get_running_loop().time(), disk, state

    seconds, disk, state = clock.run(main())
    assert [step for step, _, _ in disk.writing] == [4, 8, 12]
    assert seconds == pytest.approx(12 * STEP_S + 2.5, abs=0.1), "only the last one is waited for"
    slow = Disk(7.0)  # longer than four steps

    async def crowded() -> float:
        await Loop(make(every=4), slow.save).run()
        return asyncio.get_running_loop().time()

    seconds = clock.run(crowded())
    assert [step for step, _, _ in slow.writing] == [4, 8, 12]
    ends = [end for _, _, end in slow.writing]
    starts = [start for _, start, _ in slow.writing]
    assert all(start >= end for start, end in zip(starts[1:], ends, strict=False)), "two were written at once"
    assert state.roles.trainer.snapshots == [4, 8, 12]  # type: ignore[attr-defined]
    assert seconds == pytest.approx(4 * STEP_S + 7.0 + 7.0 + 7.0, abs=0.1)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_kill_between_snapshot_and_manifest_resumes_from_the_one_before(max_staleness: int) -> None:
    """Every step is trained once in the end, and what was trained twice meanwhile was the same."""

    async def main() -> None:
        disk = Disk(3.2)
        state = make(every=3, max_staleness=max_staleness)
        task = asyncio.create_task(Loop(state, disk.save).run())
        await asyncio.sleep(0)
        while state.version < 8:
            await asyncio.sleep(0.05)
        assert state.taken is not None and state.taken.step == 6, "the checkpoint of step 6 is on its way"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert sorted(disk.saved) == [3]
        again = make(every=3, max_staleness=max_staleness)
        again.roles.trainer.version = snapshot.restore(again, disk.saved[3]).step  # type: ignore[attr-defined]
        again.roles.fleet.version = 3  # type: ignore[misc]
        await Loop(again, disk.save).run()
        first, second = state.roles.trainer.trained, again.roles.trainer.trained  # type: ignore[attr-defined]
        assert sorted(second) == list(range(4, 13))
        if max_staleness == 0:
            assert {step: first[step] for step in range(4, 9)} == {step: second[step] for step in range(4, 9)}
        assert again.ledger.pending == sum(group.size for group in (*again.ready.values(), *again.in_flight.values()))

    clock.run(main())


def test_the_snapshot_is_of_its_step_however_long_it_takes() -> None:
    """The trainer's copy is taken before another step is sent, and the controller's part says the same step."""

    class Slow(FakeTrainer):
        async def snapshot(self, step: int) -> None:
            await asyncio.sleep(5.0)
            await super().snapshot(step)

    async def main() -> None:
        disk, state = Disk(0.5), make(every=2, steps=6)
        state.roles.trainer = Slow(lambda: STEP_S)
        await Loop(state, disk.save).run()
        assert sorted(disk.saved) == [2, 4, 6]
        for step, data in disk.saved.items():
            assert snapshot.restore(make(every=2), data).step == step

    clock.run(main())


@pytest.mark.parametrize("at_end", [True, False])
def test_a_disk_that_refuses_ends_the_run_with_the_reason(at_end: bool) -> None:
    async def full(step: int, data: bytes) -> None:
        await asyncio.sleep(1.5)
        raise StoreError("the disk is full: free space there")

    with pytest.raises(StoreError, match="the disk is full"):
        clock.run(Loop(make(every=0 if at_end else 2), full).run())


def test_a_trainer_that_cannot_take_its_snapshot_ends_the_run() -> None:
    class Broken(FakeTrainer):
        async def snapshot(self, step: int) -> None:
            raise RunFailed("out of memory")

    state = make(every=2)
    state.roles.trainer = Broken(lambda: STEP_S)
    with pytest.raises(RunFailed, match="out of memory"):
        clock.run(Loop(state, Disk(1.0).save).run())


def test_when_something_else_fails_the_checkpoint_on_its_way_is_completed() -> None:
    disk, state = Disk(4.0), make(every=2)

    class Ends(FakeTrainer):
        async def train(self, batches):  # type: ignore[no-untyped-def]
            if batches[0].step == 4:
                raise RunFailed("the gradient is not finite")
            return await super().train(batches)

    state.roles.trainer = Ends(lambda: STEP_S)
    with pytest.raises(RunFailed, match="not finite"):
        clock.run(Loop(state, disk.save).run())
    assert sorted(disk.saved) == [2]


def test_a_stop_waits_for_what_is_being_written_and_saves_the_rest() -> None:
    async def main() -> None:
        disk, state = Disk(3.0), make(every=4)
        task = asyncio.create_task(Loop(state, disk.save).run())
        while state.version < 5:
            await asyncio.sleep(0.05)
        assert state.taken is not None
        state.stopping = True
        state.signal.notify()
        await task
        assert sorted(disk.saved) == [4, state.version] and state.version in (5, 6)

    clock.run(main())


def test_a_request_at_the_very_end_is_honoured() -> None:
    async def main() -> None:
        disk, state = Disk(1.0), make(every=0, steps=2)
        state.config = state.config.model_copy(
            update={"checkpoint": state.config.checkpoint.model_copy(update={"at_end": False})}
        )
        task = asyncio.create_task(Loop(state, disk.save).run())
        while state.version < 2:
            await asyncio.sleep(0.01)
        state.checkpoint_requested = True
        await task
        assert sorted(disk.saved) == [2]

    clock.run(main())
