"""An environment for overlap_real.py: an answer earns a random number, so that every sample is trained."""

from __future__ import annotations

from prl.env import SingleTurnEnv, TaskList, share
from prl.types import Split, Task


class Noise(SingleTurnEnv):
    def tasks(self, split: Split) -> TaskList:
        return TaskList(1_000_000, lambda index: Task(f"{split}-{index}", prompt=f"task {index:06d}"))

    def score(self, task: Task, text: str) -> float:
        return share(text, task.id)
