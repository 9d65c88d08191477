"""Settings of the environments. A docstring under each field is what `prl config explain` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, model_validator

from prl.contribution import PluginConfig, wrong


class ReverseTextConfig(PluginConfig):
    alphabet: str = Field("abcdefghijklmnopqrstuvwxyz", min_length=2)
    """The letters texts are made of, each once."""
    min_length: int = Field(3, ge=1)
    """Letters of the shortest text."""
    max_length: int = Field(6, ge=1)
    """Letters of the longest text; every length is equally likely."""
    instruction: str = ""
    """Put before the text, for a model that has to be told what to do."""
    partial: Literal["prefix", "position", "none"] = "prefix"
    """What a wrong answer earns: up to 0.5 for its right beginning, for right letters at any place, or nothing."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of all texts that belong to the evaluation split, by a hash of the text."""
    seed: int = 0
    """Another seed gives other tasks; the splits stay disjoint."""
    num_tasks: int = Field(1_000_000, ge=1)
    """Tasks of the training split; they are made when they are drawn."""
    eval_tasks: int = Field(1_000, ge=1)
    """Tasks of the evaluation split, all different."""

    @model_validator(mode="after")
    def _possible(self) -> ReverseTextConfig:
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError("alphabet: a letter occurs twice")
        if self.alphabet.strip() != self.alphabet:
            raise ValueError("alphabet: must not begin or end with white space")
        if self.max_length < self.min_length:
            raise ValueError(f"max_length is {self.max_length}, less than min_length {self.min_length}")
        return self


class AlphabetSortConfig(PluginConfig):
    min_turns: int = Field(2, ge=1)
    """Turns of the shortest episode."""
    max_turns: int = Field(3, ge=1)
    """Turns of the longest episode; every number from `min_turns` to this is equally likely."""
    min_names: int = Field(2, ge=1)
    """Names that a turn brings at least."""
    max_names: int = Field(4, ge=1)
    """Names that a turn brings at most."""
    power: float = Field(4.0, gt=0)
    """A turn's reward is the similarity of its answer to the right list to this power: more is stricter."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the tasks that belong to the evaluation split, by a hash of their names."""
    seed: int = 0
    """Another seed gives other tasks; the splits stay disjoint."""
    num_tasks: int = Field(1_000_000, ge=1)
    """Tasks of the training split; they are made when they are drawn."""
    eval_tasks: int = Field(1_000, ge=1)
    """Tasks of the evaluation split, all different."""

    @model_validator(mode="after")
    def _possible(self) -> AlphabetSortConfig:
        if self.max_turns < self.min_turns:
            raise ValueError(f"max_turns is {self.max_turns}, less than min_turns {self.min_turns}")
        if self.max_names < self.min_names:
            raise ValueError(f"max_names is {self.max_names}, less than min_names {self.min_names}")
        if self.max_turns * self.max_names > 1_000:
            raise ValueError(
                f"max_turns * max_names is {self.max_turns * self.max_names}: there are names for lists of up to 1000"
            )
        return self


ConstraintKind = Literal[
    "max_words", "min_words", "exact_words", "sentences", "bullets", "paragraphs", "lowercase", "uppercase",
    "starts_with", "ends_with", "includes", "avoids", "no_commas", "quoted", "json", "repeats_request", "says_times",
    "title", "highlights",
]  # fmt: skip
"""The names in `prl_envs.constraints.KINDS`, which is not imported to check a configuration."""


class InstructionFollowingConfig(PluginConfig):
    kinds: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
    """Kinds of constraints that are drawn from, each equally likely; fewer or easier ones make it easier."""
    min_constraints: int = Field(1, ge=1)
    """Constraints of a task at least."""
    max_constraints: int = Field(3, ge=1)
    """Constraints of a task at most; every number from `min_constraints` to this is equally likely. A task has fewer
    where no further kind of `kinds` goes with those drawn: lowercase and capital letters exclude each other."""
    reward: Literal["share", "strict"] = "share"
    """The share of the constraints that are met, or 1 when all are and 0 otherwise."""
    least_words: int = Field(1, ge=1, le=20)
    """An answer of fewer words meets none of its constraints. Short answers keep to most of them, so without this a
    model may learn to say next to nothing."""
    cut_off: Literal["fails", "counts"] = "fails"
    """Whether an answer that `sampling.max_tokens` cut off meets none of its constraints, or is judged like another."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the requests that belong to the evaluation split, by a hash of the request without its constraints."""
    seed: int = 0
    """Another seed gives other tasks; the splits stay disjoint."""
    num_tasks: int = Field(1_000_000, ge=1)
    """Tasks of the training split; they are made when they are drawn."""
    eval_tasks: int = Field(1_000, ge=1)
    """Tasks of the evaluation split."""

    @model_validator(mode="after")
    def _possible(self) -> InstructionFollowingConfig:
        if not self.kinds:
            raise wrong("kinds", "is empty; name one kind of constraint at least")
        twice = sorted({kind for kind in self.kinds if self.kinds.count(kind) > 1})
        if twice:
            raise wrong("kinds", f"{', '.join(twice)} occurs twice")
        if "exact_words" in self.kinds and self.least_words > 3:
            raise wrong(
                "least_words", f"is {self.least_words}, and exact_words asks for 3 to 10: 3 at most, or without it"
            )
        if self.max_constraints < self.min_constraints:
            raise ValueError(
                f"max_constraints is {self.max_constraints}, less than min_constraints {self.min_constraints}"
            )
        if self.max_constraints > len(self.kinds):
            raise ValueError(f"max_constraints is {self.max_constraints}, and there are {len(self.kinds)} kinds")
        return self


class JsonlConfig(PluginConfig):
    path: str
    """JSONL file, one task a line: {"prompt": text} or {"messages": [...]}, and fields of your own, such as "answer".
    A relative path starts where prl is started."""
    reward: str
    """As in "./reward.py:score": score(task, text) returns a number, or a mapping with "reward" and metrics."""
    eval_path: str = ""
    """JSONL file of the evaluation split; a share of `path` when empty."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of `path` held out for evaluation, by a hash of the prompt; unused when there is `eval_path`."""
    system: str = ""
    """A system message put before every prompt."""
    shuffle: bool = True
    """Draw training tasks in a seeded random order rather than in the order of the file."""
    seed: int = 0
    """Of that order."""

    @model_validator(mode="after")
    def _files_exist(self) -> JsonlConfig:
        """Said before anything starts, and not by the environment's process when all others have started."""
        files = {"path": self.path, "eval_path": self.eval_path, "reward": self.reward.rpartition(":")[0]}
        if not files["reward"]:
            raise wrong("reward", f"is {self.reward!r}; a function in a file is needed, as in './reward.py:score'")
        for key, name in files.items():
            if name and not Path(name).expanduser().is_file():
                raise wrong(key, f"there is no file {name}")
        return self
