"""`reverse_text`: write a string backwards. Procedural and seeded; no text belongs to both splits."""

from __future__ import annotations

import random

from prl.env import SingleTurnEnv, TaskList, share, stable_seed
from prl.errors import ConfigError
from prl.types import Split, Task
from prl_envs.config import ReverseTextConfig

MAX_DRAWS = 10_000
"""Draws for one task. With a tenth of the texts held out, a thousand draws miss with probability 1e-46."""


def is_held_out(text: str, config: ReverseTextConfig) -> bool:
    """Whether a text belongs to the evaluation split. Training data of any kind must leave such texts out."""
    return share(text, "reverse_text") < config.held_out


class ReverseText(SingleTurnEnv):
    """The reward is 1 for the exact answer. Otherwise, of n letters, `partial = "prefix"` gives 0.5 * k / (n + 1)
    for the first k letters right, "position" 0.5 * the share of places that are right, "none" nothing. The end of
    the answer counts as one more place, so that an answer that runs on is worth less than one that stops.
    """

    def __init__(self, config: ReverseTextConfig) -> None:
        self.config = config
        self._texts: list[str] = []
        self._drawn: set[str] = set()
        self._eval_rng = random.Random(stable_seed(config.seed, "eval"))
        lengths = range(config.min_length, config.max_length + 1)
        if sum(len(config.alphabet) ** n for n in lengths) * config.held_out < 4 * config.eval_tasks:
            self._held_out_text(config.eval_tasks - 1)  # it may be too many: say so now

    def tasks(self, split: Split) -> TaskList:
        if split == "eval":
            return TaskList(self.config.eval_tasks, lambda index: self._task(split, index, self._held_out_text(index)))
        return TaskList(self.config.num_tasks, lambda index: self._task(split, index, self._training_text(index)))

    def score(self, task: Task, text: str) -> dict[str, float]:
        answer, target = text.strip(), task.data["answer"]
        exact = answer == target
        return {"reward": 1.0 if exact else 0.5 * self._partial(answer, target), "exact_match": float(exact)}

    def _partial(self, answer: str, target: str) -> float:
        match self.config.partial:
            case "none":
                return 0.0
            case "position":
                right = sum(a == b for a, b in zip(answer, target, strict=False)) + (len(answer) == len(target))
                return right / (max(len(answer), len(target)) + 1)
            case "prefix":
                right = 0
                while right < min(len(answer), len(target)) and answer[right] == target[right]:
                    right += 1
                return right / (len(target) + 1)

    def _task(self, split: Split, index: int, text: str) -> Task:
        prompt = f"{self.config.instruction}{text}"
        return Task(id=f"{split}-{index}", prompt=prompt, data={"text": text, "answer": text[::-1]})

    def _draw(self, rng: random.Random) -> str:
        length = rng.randint(self.config.min_length, self.config.max_length)
        return "".join(rng.choices(self.config.alphabet, k=length))

    def _training_text(self, index: int) -> str:
        rng = random.Random(stable_seed(self.config.seed, "train", index))
        for _ in range(MAX_DRAWS):
            text = self._draw(rng)
            if not is_held_out(text, self.config):
                return text
        raise self._too_few("no text is left for training")

    def _held_out_text(self, index: int) -> str:
        """The held-out texts in the order they are drawn, each once; drawn as far as needed, about 10 draws each."""
        misses = 0
        while len(self._texts) <= index:
            text = self._draw(self._eval_rng)
            if text not in self._drawn and is_held_out(text, self.config):
                misses = 0
                self._drawn.add(text)
                self._texts.append(text)
            else:
                misses += 1
            if misses > MAX_DRAWS:
                found = len(self._texts)
                raise self._too_few(f"only {found} different texts are held out, {self.config.eval_tasks} wanted")
        return self._texts[index]

    def _too_few(self, what: str) -> ConfigError:
        return ConfigError(
            [
                f"reverse_text: {what} (alphabet of {len(self.config.alphabet)}, length {self.config.min_length} to "
                f"{self.config.max_length}, held_out {self.config.held_out:g}): allow longer texts, or lower eval_tasks"
            ]
        )
