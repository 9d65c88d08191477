"""`alphabet_sort`: sort names, then merge more names into the list, turn after turn. Procedural and seeded."""

from __future__ import annotations

import difflib
import random

from prl.env import TaskList, share, stable_seed
from prl.protocols import Context
from prl.types import Episode, Split, Task
from prl_envs.config import AlphabetSortConfig

MAX_DRAWS = 10_000
LONGEST = 4

_STARTS = ("al", "be", "ca", "da", "el", "fi", "ga", "ho", "is", "jo", "ka", "li", "mi", "no", "ol", "pa", "ro", "sa")
_MIDDLES = ("", "ba", "de", "li", "mo", "na", "ri", "so", "ta", "vi")
_ENDS = ("a", "an", "e", "en", "i", "is", "la", "n", "na", "o", "ra", "s", "t", "us")

FIRST = "Sort these names alphabetically. Answer with the names only, one per line.\n\n"
LATER = "Merge these names into the sorted list. Answer with the whole list, one name per line.\n\n"


class AlphabetSort:
    """The reward is the mean over turns of ratio ** power, where ratio is difflib's similarity (0 to 1) of the answer
    and the sorted list of all names so far, one per line. A task's names decide its split.
    """

    def __init__(self, config: AlphabetSortConfig) -> None:
        self.config = config

    def tasks(self, split: Split) -> TaskList:
        count = self.config.eval_tasks if split == "eval" else self.config.num_tasks
        return TaskList(count, lambda index: self._task(split, index))

    async def run(self, task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        names: list[str] = []
        ratios: list[float] = []
        for batch in task.data["turns"]:
            turn = await agent.reply((LATER if names else FIRST) + "\n".join(batch))
            names = sorted(names + batch)
            ratios.append(similarity(turn.text, names))
        reward = sum(ratio**self.config.power for ratio in ratios) / len(ratios)
        metrics = {"turns": float(len(ratios)), "exact_match": float(min(ratios) == 1.0)}
        return Episode([agent.finish(reward)], metrics=metrics)

    def _task(self, split: Split, index: int) -> Task:
        rng = random.Random(stable_seed(self.config.seed, split, index))
        for _ in range(MAX_DRAWS):
            turns = self._draw(rng)
            names = " ".join(name for batch in turns for name in batch)
            if (share(names, "alphabet_sort") < self.config.held_out) == (split == "eval"):
                return Task(id=f"{split}-{index}", prompt=FIRST + "\n".join(turns[0]), data={"turns": turns})
        raise RuntimeError(f"no task of the {split} split in {MAX_DRAWS} draws: held_out is {self.config.held_out:g}")

    def _draw(self, rng: random.Random) -> list[list[str]]:
        """The names of every turn; no name twice."""
        sizes = [
            rng.randint(self.config.min_names, self.config.max_names)
            for _ in range(rng.randint(self.config.min_turns, self.config.max_turns))
        ]
        names: dict[str, None] = {}
        while len(names) < sum(sizes):
            names[rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)] = None
        rest = iter(names)
        return [[next(rest) for _ in range(size)] for size in sizes]


def similarity(text: str, names: list[str]) -> float:
    """difflib's ratio of the answer and the right list, letter by letter; case, blank lines and margins ignored.

    An answer more than `LONGEST` times as long counts as 0: its ratio is below 0.4, and comparing takes quadratic time.
    """
    answer = "\n".join(line.strip().lower() for line in text.splitlines() if line.strip())
    right = "\n".join(names)
    if len(answer) > LONGEST * len(right):
        return 0.0
    return difflib.SequenceMatcher(None, answer, right, autojunk=False).ratio()
