"""`instruction_following`: answer a request and keep to constraints that a rule can check. Procedural and seeded.

The constraints are in `constraints`. The manner is that of IFEval (Zhou et al., 2023, "Instruction-Following
Evaluation for Large Language Models"); requests, wordings and checks are our own.
"""

from __future__ import annotations

import random
from typing import Any

from prl.env import TaskList, share, stable_seed
from prl.errors import ConfigError
from prl.protocols import Context
from prl.types import Episode, Split, Task
from prl_envs.config import InstructionFollowingConfig
from prl_envs.constraints import KINDS, meets, words

_REQUESTS = (
    "Tell me about {}.", "Describe {} to a friend.", "What should I know about {}?", "Write a short text about {}.",
    "Explain {} to a child.", "Give some advice about {}.", "Why do we care about {}?", "Make a case for {}.",
    "What is special about {}?", "Write a message about {}.",
)  # fmt: skip
_SUBJECTS = (
    "the sea", "old trains", "cooking rice", "city birds", "learning a language", "the moon", "night shifts",
    "chess", "growing tomatoes", "long walks", "maps", "snow", "public libraries", "bicycles", "the desert", "tea",
    "volcanoes", "small dogs", "painting a room", "saving money", "board games", "wind power", "lost keys",
    "folk songs", "bees", "early mornings", "handwriting", "street food", "sleep", "bread", "the north wind",
    "car repair", "swimming", "a first job", "moving house", "houseplants", "lighthouses", "photographs", "rain",
    "school lunches", "running shoes", "clocks", "dinosaurs", "local news", "radio", "whales", "camping",
    "grandparents", "robots", "apples", "museums", "neighbours", "thunder", "puzzles", "cheese", "football",
    "a good chair", "rivers and lakes", "airports", "cats", "poetry", "wool", "working from home", "honesty",
    "the number seven", "glass", "salt", "soap", "umbrellas", "theatre",
)  # fmt: skip


class InstructionFollowing:
    """The reward of an answer is the share of its constraints that are met, or with `reward = "strict"` 1 when all are
    and 0 otherwise. An answer of fewer than `least_words` meets none, nor does one that `sampling.max_tokens` ended,
    unless `cut_off` is "counts".

    A request, not its constraints, decides a task's split: evaluation asks about what was never asked in training.
    """

    def __init__(self, config: InstructionFollowingConfig) -> None:
        self.config = config
        self._requests: dict[Split, list[str]] = {"train": [], "eval": []}
        for subject in _SUBJECTS:
            for wording in _REQUESTS:
                request = wording.format(subject)
                held_out = share(request, "instruction_following") < config.held_out
                self._requests["eval" if held_out else "train"].append(request)
        for split, requests in self._requests.items():
            if not requests:
                raise ConfigError(
                    [
                        f"instruction_following: held_out is {config.held_out:g}, which leaves no request of "
                        f"{len(_SUBJECTS) * len(_REQUESTS)} to the {split} split"
                    ]
                )

    def tasks(self, split: Split) -> TaskList:
        count = self.config.eval_tasks if split == "eval" else self.config.num_tasks
        return TaskList(count, lambda index: self._task(split, index))

    async def run(self, task: Task, ctx: Context) -> Episode:
        agent = ctx.agent()
        turn = await agent.reply(task.prompt)
        metrics = self.verdict(task, turn.text, finished=turn.stop_reason != "length")
        reward = metrics[self.config.reward]
        return Episode([agent.finish(reward)], metrics=metrics)

    def verdict(self, task: Task, text: str, *, finished: bool) -> dict[str, float]:
        """Metrics: `share` and `strict` as the two rewards, `finished`, and `met/KIND` for each kind in the task."""
        constraints: list[dict[str, Any]] = task.data["constraints"]
        counts = finished or self.config.cut_off == "counts"
        counts = counts and len(words(text)) >= self.config.least_words
        met = {c["kind"]: float(counts and meets(c["kind"], text, c["arguments"])) for c in constraints}
        return {
            "share": sum(met.values()) / len(met),
            "strict": float(all(met.values())),
            "finished": float(finished),
            **{f"met/{kind}": value for kind, value in met.items()},
        }

    def _task(self, split: Split, index: int) -> Task:
        rng = random.Random(stable_seed(self.config.seed, split, index))
        request = rng.choice(self._requests[split])
        number = rng.randint(self.config.min_constraints, self.config.max_constraints)
        parts, constraints = [request], []
        for kind in draw_kinds(self.config.kinds, number, rng):
            arguments = KINDS[kind].draw(rng, request)
            parts.append(KINDS[kind].ask(arguments, rng))
            constraints.append({"kind": kind, "arguments": arguments})
        return Task(
            id=f"{split}-{index}", prompt=" ".join(parts), data={"request": request, "constraints": constraints}
        )


def draw_kinds(kinds: tuple[str, ...], number: int, rng: random.Random) -> list[str]:
    """`number` kinds that can be asked for together, in random order; fewer where no further one goes with them."""
    drawn: list[str] = []
    taken: set[str] = set()
    for kind in rng.sample(kinds, len(kinds)):
        if len(drawn) < number and not taken & KINDS[kind].takes:
            drawn.append(kind)
            taken |= KINDS[kind].takes
    return drawn
