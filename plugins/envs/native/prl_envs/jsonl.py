"""`jsonl`: your own prompts from a file, scored by a function of yours.

A line is an object with "prompt" (text) or "messages" (a list of {"role", "content"}), and any further fields; those
are `task.data` for the reward function. "id" is optional.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from prl import files
from prl.contribution import Contribution
from prl.env import Score, SingleTurnEnv, share
from prl.errors import ConfigError
from prl.types import Message, Split, Task, as_messages
from prl_envs.config import JsonlConfig

SHOWN_PROBLEMS = 20

log = logging.getLogger(__name__)


def build(config: JsonlConfig) -> JsonlEnv:
    """Read the files and the reward function.

    Raises:
        ConfigError: every line that is wrong, up to 20, with file and line number.
        PluginError: the reward function cannot be loaded.
    """
    score = files.named(config.reward)
    if isinstance(score, Contribution):
        raise ConfigError([f"jsonl: {config.reward} is a Contribution; a function score(task, text) is needed"])
    train = read_tasks(Path(config.path).expanduser(), config.system)
    if config.eval_path:
        held_out = read_tasks(Path(config.eval_path).expanduser(), config.system)
        train = _without(train, held_out, config)
    else:
        held_out = [task for task in train if share(prompt_key(task), "jsonl") < config.held_out]
        train = [task for task in train if share(prompt_key(task), "jsonl") >= config.held_out]
    if not train:
        raise ConfigError([f"jsonl: no training task is left in {config.path}; lower held_out ({config.held_out:g})"])
    if config.shuffle:
        random.Random(config.seed).shuffle(train)
    return JsonlEnv(train, held_out, score, config)


class JsonlEnv(SingleTurnEnv):
    """One prompt, one answer, and `score(task, text)` from a file."""

    def __init__(
        self,
        train: Sequence[Task],
        held_out: Sequence[Task],
        score: Callable[[Task, str], Score | Awaitable[Score]],
        config: JsonlConfig,
    ) -> None:
        self._train = train
        self._held_out = held_out
        self._score = score
        self._config = config

    def tasks(self, split: Split) -> Sequence[Task]:
        if split == "train":
            return self._train
        if not self._held_out:
            raise ConfigError(
                [
                    f"jsonl: no line of {self._config.path} falls into the evaluation split "
                    f"(held_out = {self._config.held_out:g}): raise it, give eval_path, or set eval.tasks = 0"
                ]
            )
        return self._held_out

    def score(self, task: Task, text: str) -> Score | Awaitable[Score]:
        return self._score(task, text)


def prompt_key(task: Task) -> str:
    """What decides a task's split: its prompt alone, so that a prompt that occurs twice stays on one side."""
    if isinstance(task.prompt, str):
        return task.prompt
    return json.dumps([[message.role, message.content] for message in task.prompt if message.role != "system"])


def read_tasks(path: Path, system: str = "") -> list[Task]:
    """The tasks of a JSONL file; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, is empty, or has lines that are no tasks.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error.strerror if isinstance(error, OSError) else error}"]) from error
    tasks: list[Task] = []
    problems: list[str] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = _task(line, number, path.stem, system)
            if task.id in first_line:
                raise ValueError(f"id {task.id!r} is already that of line {first_line[task.id]}")
            first_line[task.id] = number
            tasks.append(task)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        shown = problems[:SHOWN_PROBLEMS]
        raise ConfigError([*shown, f"{path}: and {more} more lines like these"] if more > 0 else shown)
    if not tasks:
        raise ConfigError([f"{path}: there is no task in it"])
    return tasks


def _task(line: str, number: int, stem: str, system: str) -> Task:
    """One line.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        record = json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f"an object is needed, this is a {type(record).__name__}")
    if ("prompt" in record) == ("messages" in record):
        raise ValueError('exactly one of "prompt" and "messages" is needed; the keys are ' + ", ".join(sorted(record)))
    prompt = _prompt(record.pop("prompt")) if "prompt" in record else _messages(record.pop("messages"))
    if system:
        prompt = (Message("system", system), *as_messages(prompt))
    return Task(id=str(record.pop("id", f"{stem}-{number}")), prompt=prompt, data=record)


def _prompt(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f'"prompt" must be a text that is not empty, this is {value!r}')
    return value


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError('"messages" must be a list that is not empty')
    messages = as_messages(value)  # a msgspec.ValidationError is a ValueError and says what is missing
    if messages[-1].role == "assistant":
        raise ValueError('"messages" must not end with the assistant\'s turn: that one is sampled')
    return messages


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without(train: list[Task], held_out: Sequence[Task], config: JsonlConfig) -> list[Task]:
    """Training tasks whose prompt is not in the evaluation file."""
    excluded = {prompt_key(task) for task in held_out}
    kept = [task for task in train if prompt_key(task) not in excluded]
    if len(kept) < len(train):
        log.warning("%d lines of %s are also in %s: left out", len(train) - len(kept), config.path, config.eval_path)
    return kept
