"""Conversations to tokens, and which of them are trained.

`TemplateRenderer` works with any tokenizer. A conversation goes through its chat template; a trained turn is trained
with its end-of-turn token, and whatever the template writes after that is not: an engine stops there. Each turn is
encoded apart from what precedes it, because that is how an engine sees it: the prompt first, and then only tokens that
the model made. Plain prompts and completions are encoded as they are, with the end-of-sequence token after the
completion.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jinja2
import numpy as np
from numpy.typing import NDArray

from prl.errors import ConfigError
from prl_trainer_fsdp.sft.records import BadRow, Conversation, Record, Text

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """token_ids i32[T]; trained bool[T], false for the first token, which nothing predicts."""

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    @staticmethod
    def of(token_ids: Sequence[int], trained: Sequence[bool]) -> Example:
        flags = np.array(trained, np.bool_)
        flags[:1] = False
        return Example(np.array(token_ids, np.int32), flags)

    @property
    def num_trained(self) -> int:
        return int(self.trained.sum())

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Example:
        return Example(self.token_ids[:length], self.trained[:length])


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is encoded on its own."""

    text: str
    trained: bool


class Renderer(Protocol):
    name: str
    """What it is, for the log."""

    def encode(self, records: Sequence[Record]) -> list[Example | BadRow]:
        """Each on its own: what one of them is does not depend on the others.

        Raises:
            ConfigError: conversations cannot be rendered at all.
        """
        ...


def choose(tokenizer: Any, path: str, wanted: str) -> Renderer:
    """`data.renderer`. The gateway chooses by the same rule (`prl_gateway.library`).

    Args:
        path: `model.path`: the library knows a model by its name on the hub only.

    Raises:
        ConfigError: the library has no renderer of that name, or it does not fit the tokenizer.
        EnvironmentNotFit: the library is asked for and not installed.
    """
    if wanted == "template":
        return TemplateRenderer(tokenizer)
    from prl_trainer_fsdp.sft import library

    if wanted == "auto":
        return library.known(tokenizer, path) or TemplateRenderer(tokenizer)
    return library.named(tokenizer, wanted)


class TemplateRenderer:
    """See the module."""

    def __init__(self, tokenizer: Any) -> None:
        self.name = "the tokenizer's chat template"
        self._tokenizer = tokenizer
        self._ends = tuple(token for token in tokenizer.all_special_tokens if token)

    def encode(self, records: Sequence[Record]) -> list[Example | BadRow]:
        cut = [self._cut(record) for record in records]
        texts = [piece.text for pieces in cut if not isinstance(pieces, BadRow) for piece in pieces]
        encoded = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else ())
        return [
            pieces if isinstance(pieces, BadRow) else _joined(pieces, [next(encoded) for _ in pieces]) for pieces in cut
        ]

    def pieces(self, record: Record) -> list[Piece]:
        """Raises: BadRow: the chat template refuses the messages, or rewrites earlier turns."""
        if isinstance(record, Text):
            return text_pieces(self._tokenizer, record)
        return self._conversation(record)

    def _cut(self, record: Record) -> list[Piece] | BadRow:
        try:
            return self.pieces(record)
        except BadRow as error:
            return error

    def _conversation(self, conversation: Conversation) -> list[Piece]:
        messages, tools = conversation.messages, conversation.tools
        whole = self._render(messages, tools, prompt=False)
        pieces: list[Piece] = []
        done = 0
        for index, trained in enumerate(conversation.trained):
            if not trained:
                continue
            before = self._render(messages[:index], tools, prompt=True)
            is_last = index == len(messages) - 1
            after = whole if is_last else self._render(messages[: index + 1], tools, prompt=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise BadRow(
                    f"the chat template writes turn {index + 1} differently once others follow it: give every "
                    f"assistant turn an example of its own"
                )
            end = self._end_of_turn(after, len(before))
            pieces += [Piece(whole[done : len(before)], False), Piece(whole[len(before) : end], True)]
            done = end
        return [*pieces, Piece(whole[done:], False)]

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompt: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(["the tokenizer has no chat template: give examples as prompt and completion"])
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise BadRow(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def _end_of_turn(self, text: str, start: int) -> int:
        """After the last special token of the turn, or at its end where the template writes none."""
        ends = [text.rfind(token, start) + len(token) for token in self._ends if text.rfind(token, start) >= 0]
        return max(ends, default=len(text))


def text_pieces(tokenizer: Any, record: Text) -> list[Piece]:
    return [Piece(record.prompt, False), Piece(record.completion + (tokenizer.eos_token or ""), True)]


def _joined(pieces: Sequence[Piece], encoded: Sequence[Sequence[int]]) -> Example:
    tokens = [token for ids in encoded for token in ids]
    return Example.of(tokens, [piece.trained for piece, ids in zip(pieces, encoded, strict=True) for _ in ids])


def load_tokenizer(path: str) -> Any:
    """Raises: ConfigError: there is none in the model's folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path = {path!r} has no tokenizer that can be loaded: {error}"]) from error
