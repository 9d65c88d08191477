"""The contract of an environment: repeatable tasks, disjoint splits, and episodes that end well whatever is answered.

Episodes run on real time with scripted agents; each check takes well under a second for an environment that waits for
nothing but its agents.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from prl.errors import EpisodeFailed
from prl.messages import ReplyRequest
from prl.protocols import Env
from prl.testing.contracts import NotApplicable
from prl.testing.scripted import Script, context, play
from prl.types import Episode, Message, Reward, Rollout, Split, Task, Turn

Make = Callable[[], Env]
SPLITS: tuple[Split, ...] = ("train", "eval")
HEAD = 128
"""Tasks of a split that are looked at."""
PLAYED = 3
"""Tasks that are played for each script."""
CANCEL_LIMIT_S = 2.0


def tasks_are_the_same_every_time(make: Make) -> None:
    """A resumed run, and another worker, must draw the same tasks."""
    one, other = make(), make()
    for split in SPLITS:
        first = _encoded(head(one, split))
        assert first == _encoded(head(other, split)), f"two instances with the same settings differ in {split} tasks"
        assert first == _encoded(head(one, split)), f"asked for its {split} tasks again, it gave others"


def there_are_tasks_with_ids_of_their_own(make: Make) -> None:
    env = make()
    assert head(env, "train"), "there are no train tasks"
    for split in SPLITS:
        ids = [task.id for task in head(env, split)]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        assert not twice, f"{split} tasks share the ids {', '.join(twice[:5])}"


def tasks_survive_json(make: Make) -> None:
    env = make()
    for split in SPLITS:
        for task in head(env, split):
            assert isinstance(task, Task), f"{split} holds a {type(task).__name__}, not a prl.Task"
            back = msgspec.json.decode(msgspec.json.encode(task), type=Task)
            assert back == task, f"{split} task {task.id!r} comes back from JSON as {back!r}, it was {task!r}"


def splits_are_disjoint(make: Make) -> None:
    env = make()
    held_out = {_content(task): task.id for task in head(env, "eval", 4 * HEAD)}
    if not held_out:
        raise NotApplicable("the eval split is empty")
    for task in head(env, "train", 4 * HEAD):
        twin = held_out.get(_content(task))
        assert twin is None, f"train task {task.id!r} has the content of eval task {twin!r}"


def episodes_end_well(make: Make) -> None:
    """Whatever the agents answer: an episode with finite rewards, one rollout per agent, that can be sent."""
    env = make()
    for name, script in SCRIPTS.items():
        for split in SPLITS:
            for task in head(env, split, PLAYED):
                stop = "length" if name == "cut off" else "stop"
                try:
                    episode = asyncio.run(play(env, task, script, stop_reason=stop))  # type: ignore[arg-type]
                except TimeoutError:
                    raise AssertionError(f"task {task.id!r} with {name} answers did not end within 10 s") from None
                except Exception as error:
                    raise AssertionError(
                        f"task {task.id!r} with {name} answers: {type(error).__name__}: {error}"
                    ) from error
                check_episode(episode, f"task {task.id!r} with {name} answers")


def scores_are_repeatable(make: Make) -> None:
    for name, script in SCRIPTS.items():
        for task in head(make(), "train", PLAYED):
            one, other = (_outcome(asyncio.run(play(make(), task, script, seed=5))) for _ in range(2))
            assert one == other, f"task {task.id!r} with {name} answers and one seed gave {one}, then {other}"


def episodes_do_not_share_state(make: Make) -> None:
    """Many episodes of one environment run at once, in one process."""
    env = make()
    tasks = head(env, "train", 4) * 2

    async def together() -> list[Episode]:
        return await asyncio.gather(
            *(play(env, task, SCRIPTS["echoing"], seed=index) for index, task in enumerate(tasks))
        )

    alone = [
        _outcome(asyncio.run(play(make(), task, SCRIPTS["echoing"], seed=index))) for index, task in enumerate(tasks)
    ]
    for task, expected, episode in zip(tasks, alone, asyncio.run(together()), strict=True):
        got = _outcome(episode)
        assert got == expected, f"task {task.id!r} gave {expected} alone, and {got} beside other episodes"


def it_can_be_cancelled(make: Make) -> None:
    env = make()
    task = head(env, "train", 1)[0]

    async def cancelled() -> None:
        asked = asyncio.Event()

        async def never(request: ReplyRequest) -> Turn:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        running = asyncio.create_task(env.run(task, context(task, never)))
        waiting = asyncio.create_task(asked.wait())
        await asyncio.wait([running, waiting], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            raise NotApplicable("an episode ends without asking an agent")
        running.cancel()
        await asyncio.wait([running], timeout=CANCEL_LIMIT_S)
        assert running.done(), f"cancelled, it still ran {CANCEL_LIMIT_S:g} s later"
        assert running.cancelled(), "cancelled, it ended as if nothing had happened: let asyncio.CancelledError through"

    asyncio.run(cancelled())


def a_failing_engine_ends_the_episode(make: Make) -> None:
    env = make()
    task = head(env, "train", 1)[0]
    asked = False

    async def fails(request: ReplyRequest) -> Turn:
        nonlocal asked
        asked = True
        raise EpisodeFailed("engine_lost", "the engine is gone", retryable=True)

    try:
        asyncio.run(env.run(task, context(task, fails)))
    except EpisodeFailed as error:
        assert error.reason == "engine_lost", f"the engine's failure came out as {error.reason!r}"
        return
    if not asked:
        raise NotApplicable("an episode ends without asking an agent")
    raise AssertionError("agent.reply raised EpisodeFailed and run returned an episode: let it through")


def global_random_state_is_left_alone(make: Make) -> None:
    """What draws from the global generators makes every other random stream of the process unrepeatable."""
    python, numpy = random.getstate(), msgspec.msgpack.encode(_numpy_state())
    env = make()
    for task in head(env, "train", PLAYED):
        asyncio.run(play(env, task, SCRIPTS["echoing"]))
    assert random.getstate() == python, "it uses the random module's global generator: use ctx.rng, or your own"
    assert msgspec.msgpack.encode(_numpy_state()) == numpy, "it uses numpy's global generator: make your own"


def answers_are_never_executed(make: Make) -> None:
    """Model text that is code for Python's eval or for a shell must stay text."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "executed"
        bait = (
            f"__import__('pathlib').Path({str(trace)!r}).touch()",
            f"$(touch {trace}); touch {trace}",
            f"```python\nopen({str(trace)!r}, 'w').write('x')\n```",
        )
        env = make()
        for task in head(env, "train", PLAYED):
            for text in bait:
                asyncio.run(play(env, task, lambda request, turn, text=text: text))  # type: ignore[misc]
                assert not trace.exists(), f"an answer was executed: {text}"


# --- scripts and helpers ----------------------------------------------------------------------------------


def _echo(request: ReplyRequest, turn: int) -> str:
    return request.messages[-1].content if request.messages else ""


def _noise(request: ReplyRequest, turn: int) -> str:
    stream = random.Random(turn)
    return "".join(chr(stream.choice((*range(32, 127), 10, 0x1F600, 0x202E, 0x4E2D))) for _ in range(60))


SCRIPTS: dict[str, Script] = {
    "empty": lambda request, turn: "",
    "echoing": _echo,
    "random": _noise,
    "very long": lambda request, turn: "abc def\n" * 5_000,
    "broken JSON": lambda request, turn: '{"answer": [1, "\\ud800", nan, </answer> \\boxed{',
    "cut off": lambda request, turn: "The answer is",
}


def head(env: Env, split: Split, count: int = HEAD) -> list[Task]:
    return list(islice(iter(env.tasks(split)), count))


def check_episode(episode: object, where: str) -> None:
    """What `Env.run` may return."""
    assert isinstance(episode, Episode), f"{where}: run returned a {type(episode).__name__}, not a prl.Episode"
    if episode.errors:
        return
    names = [rollout.agent for rollout in episode.rollouts]
    assert names and len(set(names)) == len(names), f"{where}: one rollout per agent is expected, there are {names}"
    for rollout in episode.rollouts:
        _check_rollout(rollout, f"{where}: agent {rollout.agent!r}")
    for name, value in episode.metrics.items():
        assert math.isfinite(float(value)), f"{where}: metric {name!r} is {value}"
    try:
        msgspec.msgpack.encode(episode)
    except (TypeError, ValueError, OverflowError) as error:
        raise AssertionError(f"{where}: the episode cannot be sent: {error}") from error


def _check_rollout(rollout: Rollout, where: str) -> None:
    assert all(isinstance(message, Message) for message in rollout.messages), f"{where}: a message is no prl.Message"
    for name, reward in rollout.rewards.items():
        if reward is None:
            continue
        assert isinstance(reward, Reward), f"{where}: reward {name!r} is a {type(reward).__name__}, not a prl.Reward"
        assert math.isfinite(reward.score) and math.isfinite(reward.weight), f"{where}: reward {name!r} is {reward}"
    if rollout.trainable:
        assert rollout.rewards, f"{where} has no reward; one that cannot be scored yet is None"


def _encoded(tasks: list[Task]) -> list[bytes]:
    return [msgspec.json.encode(task) for task in tasks]


def _content(task: Task) -> bytes:
    return msgspec.json.encode((task.prompt, task.data))


def _outcome(episode: Episode) -> tuple[object, ...]:
    return ([rollout.rewards for rollout in episode.rollouts], dict(episode.metrics), episode.errors)


def _numpy_state() -> list[object]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return [name, np.asarray(keys).tolist(), *rest]


CHECKS = [
    tasks_are_the_same_every_time,
    there_are_tasks_with_ids_of_their_own,
    tasks_survive_json,
    splits_are_disjoint,
    episodes_end_well,
    scores_are_repeatable,
    episodes_do_not_share_state,
    it_can_be_cancelled,
    a_failing_engine_ends_the_episode,
    global_random_state_is_left_alone,
    answers_are_never_executed,
]
