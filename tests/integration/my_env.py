"""The environment of the integration tests, named by file in their configurations: "./my_env.py:MyEnv".

The reward is dense, so that a model with random weights has something to learn from. The other settings make it
misbehave; what happens once is noted in a file, because a worker that was started again remembers nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from prl.env import SingleTurnEnv, TaskList, scored
from prl.protocols import Context
from prl.types import Episode, Split, Task


class MyEnv(SingleTurnEnv):
    """Args:
    turns: of every episode; each answer is followed by the next question.
    seconds: how long every training episode takes beside its answer.
    block, die: the task in which the worker once stops answering, or kills itself; -1 for none.
    broken: it cannot even be made.
    hold: an evaluation is not over before there is a file "go" in `marks`; one that waits for it writes "held".
    marks: folder of the notes about that.
    """

    def __init__(
        self,
        turns: int = 1,
        seconds: float = 0.0,
        block: int = -1,
        die: int = -1,
        broken: bool = False,
        hold: bool = False,
        marks: str = "",
    ) -> None:
        if broken:
            raise RuntimeError("the data set of this environment is gone")
        self.turns = turns
        self.seconds = seconds
        self.block = block
        self.die = die
        self.hold = hold
        self.marks = Path(marks)

    def tasks(self, split: Split) -> TaskList:
        return TaskList(200, lambda index: Task(f"{split}-{index}", f"{split[0]}{index:03d}", {"index": index}))

    async def run(self, task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        text = (await agent.reply(task.prompt)).text
        for number in range(1, self.turns):
            text += (await agent.reply(f"{number}{text[:3]}")).text
        if ctx.kind == "train":
            await self._misbehave(task.data["index"])
        elif self.hold:
            (self.marks / "held").touch()
            while not (self.marks / "go").exists():
                await asyncio.sleep(0.01)
        odd = sum(ord(letter) % 2 for letter in text)
        return scored(agent, {"reward": odd / 8, "letters": len(text)})

    async def _misbehave(self, index: int) -> None:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        if index == self.block and self._first("block"):
            hold_everything_up()
        if index == self.die and self._first("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _first(self, what: str) -> bool:
        try:
            (self.marks / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def hold_everything_up() -> None:
    """Called on the event loop: from now on the worker answers nothing."""
    time.sleep(600)
