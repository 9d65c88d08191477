"""Supervised examples: JSONL in, token ids and a mask of the trained tokens out.

A line is {"messages": [...]} or {"prompt": ..., "completion": ...}. Conversations go through the tokenizer's chat
template; every assistant turn is trained, its end-of-turn token included and whatever the template writes after that
not: an engine stops there. Each turn is encoded apart from what precedes it, because that is how an engine sees it: the
prompt first, and then only tokens that the model made. Plain prompts and completions are encoded as they are, with the
end-of-sequence token after the completion.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prl.errors import ConfigError
from prl.rows import PackedRow


@dataclass(frozen=True)
class Example:
    """token_ids i32[T]; trained bool[T], false for the first token, which nothing predicts."""

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    @property
    def num_trained(self) -> int:
        return int(self.trained.sum())


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is encoded on its own."""

    text: str
    trained: bool


class Dataset:
    """The lines of a file, encoded when they are asked for.

    Raises:
        ConfigError: the file cannot be read or is empty; from `examples`, a line is not what it should be.
    """

    def __init__(self, path: str, tokenizer: Any, max_tokens: int) -> None:
        self._path = Path(path)
        self._renderer = Renderer(tokenizer)
        self._max_tokens = max_tokens
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError([f"data: {path} cannot be read: {error.strerror}"]) from error
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not self._lines:
            raise ConfigError([f"data: {path} holds no example"])

    def __len__(self) -> int:
        return len(self._lines)

    def examples(self, indices: Iterable[int]) -> list[Example]:
        numbers, lines = zip(*(self._lines[index] for index in indices), strict=True)
        try:
            examples = self._renderer.encode([self._renderer.pieces(json.loads(line)) for line in lines])
        except (ConfigError, ValueError, TypeError, KeyError) as error:
            self._blame(numbers, lines)
            raise ConfigError([f"{self._path}: {error}"]) from error
        for number, example in zip(numbers, examples, strict=True):
            self._check(number, example)
        return examples

    def _check(self, number: int, example: Example) -> None:
        if len(example.token_ids) > self._max_tokens:
            raise ConfigError(
                [
                    f"{self._path}:{number}: the example has {len(example.token_ids)} tokens and a packed row holds "
                    f"{self._max_tokens}: raise trainer.row_tokens or shorten it"
                ]
            )
        if not example.trained.any():
            raise ConfigError([f"{self._path}:{number}: the example has no token to train: no assistant turn?"])

    def _blame(self, numbers: Sequence[int], lines: Sequence[bytes]) -> None:
        """Name the first line that is wrong. Raises ConfigError."""
        for number, line in zip(numbers, lines, strict=True):
            try:
                self._renderer.pieces(json.loads(line))
            except (ConfigError, ValueError, TypeError, KeyError) as error:
                raise ConfigError([f"{self._path}:{number}: {type(error).__name__}: {error}"]) from error


class Renderer:
    """Turns an example into pieces of text, and many examples into tokens at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ends = tuple(token for token in tokenizer.all_special_tokens if token)

    def pieces(self, example: Mapping[str, Any]) -> list[Piece]:
        """Raises: ConfigError: the example has neither shape, or its chat template rewrites earlier turns."""
        if "messages" in example:
            return self._conversation(list(example["messages"]))
        if "prompt" not in example or "completion" not in example:
            raise ConfigError(['expected {"messages": [...]} or {"prompt": ..., "completion": ...}'])
        prompt, completion = example["prompt"], example["completion"]
        if not isinstance(prompt, str):
            turns = completion if not isinstance(completion, str) else [{"role": "assistant", "content": completion}]
            return self._conversation([*prompt, *turns])
        return [Piece(prompt, False), Piece(completion + (self._tokenizer.eos_token or ""), True)]

    def _conversation(self, messages: list[dict[str, Any]]) -> list[Piece]:
        whole = self._render(messages, prompt=False)
        pieces: list[Piece] = []
        done = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], prompt=True)
            after = whole if index == len(messages) - 1 else self._render(messages[: index + 1], prompt=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ConfigError(
                    [
                        f"the chat template writes turn {index + 1} differently once others follow it: give every "
                        f"assistant turn an example of its own"
                    ]
                )
            end = self._end_of_turn(after, len(before))
            pieces += [Piece(whole[done : len(before)], False), Piece(whole[len(before) : end], True)]
            done = end
        return [*pieces, Piece(whole[done:], False)]

    def _render(self, messages: list[dict[str, Any]], *, prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(["the tokenizer has no chat template: give examples as prompt and completion"])
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    def _end_of_turn(self, text: str, start: int) -> int:
        """After the last special token of the turn, or at its end where the template writes none."""
        ends = [text.rfind(token, start) + len(token) for token in self._ends if text.rfind(token, start) >= 0]
        return max(ends, default=len(text))

    def encode(self, examples: Sequence[Sequence[Piece]]) -> list[Example]:
        """Token ids of each piece, one after another."""
        texts = [piece.text for pieces in examples for piece in pieces]
        encoded = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"])
        return [self._join(pieces, [next(encoded) for _ in pieces]) for pieces in examples]

    def _join(self, pieces: Sequence[Piece], encoded: Sequence[Sequence[int]]) -> Example:
        flags = np.repeat([piece.trained for piece in pieces], [len(ids) for ids in encoded])
        if len(flags):
            flags[0] = False
        tokens = [token for ids in encoded for token in ids]
        return Example(np.array(tokens, np.int32), flags.astype(np.bool_))


def order(size: int, step: int, batch_size: int, seed: int, shuffle: bool) -> list[int]:
    """Examples of one step, counted from 1: epochs one after another, each in file order or in its own random order."""
    first = (step - 1) * batch_size
    positions = np.arange(first, first + batch_size)
    if not shuffle:
        return (positions % size).tolist()
    epochs = {
        int(epoch): np.random.default_rng([seed, int(epoch)]).permutation(size) for epoch in set(positions // size)
    }
    return [int(epochs[int(position // size)][position % size]) for position in positions]


def packed_row(examples: Sequence[Example]) -> PackedRow:
    """One row in which every trained token weighs 1 in the component `ce`; empty for no examples."""
    lengths = np.array([len(example.token_ids) for example in examples], np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    trained = np.concatenate([example.trained for example in examples]) if examples else np.zeros(0, np.bool_)
    nothing = np.zeros(total, np.float32)
    return PackedRow(
        token_ids=np.concatenate([e.token_ids for e in examples]) if examples else np.zeros(0, np.int32),
        position_ids=(np.arange(total) - np.repeat(ends - lengths, lengths)).astype(np.int32),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
        sampled=np.zeros(total, np.bool_),
        logprobs=nothing,
        versions=np.full(total, -1, np.int32),
        temperatures=np.ones(total, np.float32),
        advantages=nothing,
        rl=nothing,
        ce=trained.astype(np.float32),
        ref_kl=nothing,
    )
