"""The environment: procedural tasks with disjoint splits, and an exact score."""

from __future__ import annotations

import random
import re

from acme_arithmetic.config import ArithmeticConfig
from prl import Task
from prl.env import SingleTurnEnv, TaskList, share, stable_seed
from prl.types import Split

NUMBER = re.compile(r"-?\d+")
MAX_DRAWS = 10_000
"""Draws for one task; with a tenth held out, missing so often has probability 1e-457."""


class Arithmetic(SingleTurnEnv):
    """ "Compute 3 + 4 * 5." The reward is 1 if the last number of the answer is right, otherwise 0."""

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config
        self._eval = self._held_out()

    def tasks(self, split: Split) -> TaskList:
        """Task `index` of a split is the same in every process: it is drawn from a seed made of both."""
        if split == "eval":
            return TaskList(len(self._eval), lambda index: self._task(f"eval-{index}", self._eval[index]))
        return TaskList(self.config.num_tasks, lambda index: self._task(f"train-{index}", self._training(index)))

    def score(self, task: Task, text: str) -> dict[str, float]:
        numbers = NUMBER.findall(text)
        right = bool(numbers) and numbers[-1] == task.data["answer"]
        return {"reward": float(right), "answered": float(bool(numbers))}

    def _task(self, name: str, expression: str) -> Task:
        prompt = f"Compute {expression}. Answer with the number."
        return Task(id=name, prompt=prompt, data={"expression": expression, "answer": str(value(expression))})

    def _training(self, index: int) -> str:
        rng = random.Random(stable_seed(self.config.seed, "train", index))
        drawn = (self._draw(rng) for _ in range(MAX_DRAWS))
        return next(expression for expression in drawn if not self._is_held_out(expression))

    def _held_out(self) -> list[str]:
        rng = random.Random(stable_seed(self.config.seed, "eval"))
        found: dict[str, None] = {}
        while len(found) < self.config.eval_tasks:
            expression = self._draw(rng)
            if self._is_held_out(expression):
                found[expression] = None
        return list(found)

    def _is_held_out(self, expression: str) -> bool:
        return share(expression, "arithmetic") < self.config.held_out

    def _draw(self, rng: random.Random) -> str:
        numbers = [str(rng.randint(1, self.config.max_number)) for _ in range(self.config.num_terms)]
        return numbers[0] + "".join(f" {rng.choice('+-*')} {number}" for number in numbers[1:])


def value(expression: str) -> int:
    """The value of an expression of +, - and *. Written out: nothing here may call `eval` on text."""
    total = 0
    for sign, product in re.findall(r"(^|[+-])([^+-]+)", expression):
        factor = 1
        for number in product.split("*"):
            factor *= int(number)
        total += -factor if sign == "-" else factor
    return total
