"""The environment of vllm_generation.py: one turn for every prompt of a file, and always the same reward."""

from __future__ import annotations

import json
from pathlib import Path

from prl.env import SingleTurnEnv, TaskList
from prl.types import Split, Task


class Prompts(SingleTurnEnv):
    """`prompts` is a JSON file with a list of lists of token ids; word "wN" of the tokenizer is token N."""

    def __init__(self, prompts: str) -> None:
        self._prompts: list[list[int]] = json.loads(Path(prompts).read_text())

    def tasks(self, split: Split) -> TaskList:
        return TaskList(len(self._prompts), lambda index: Task(f"{split}-{index}", prompt=self._text(index)))

    def _text(self, index: int) -> str:
        return " ".join(f"w{token}" for token in self._prompts[index])

    def score(self, task: Task, text: str) -> float:
        return 1.0
