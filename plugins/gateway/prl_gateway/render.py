"""Messages to tokens. What was sampled is never rendered: a turn's new tokens are what the template puts after it.

`TemplateRenderer` works with any chat template. The text of a conversation up to the assistant's turn is kept; when new
messages come, the template renders everything, and what follows the kept text and the assistant's own words becomes
tokens. A template that changes what it had written before (one that strips reasoning from past turns, say) does not
extend its own text: then there is no extension, and the caller starts another segment.

First turns take a short cut, which is what makes them cheap: for a sequence of roles the template's own text around
the contents is found once, checked on contents of many kinds, and cut at special tokens, which no tokenisation
crosses. Afterwards only the spans with content are tokenised. A content that holds anything the template compares
texts with, special tokens, or whitespace at an edge takes the long way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jinja2

from prl.errors import EpisodeFailed, UsageError
from prl.types import Message
from prl_gateway.template import ChatTokenizer, finder, literals

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, Any]]


class Prompt(NamedTuple):
    """A conversation up to where the assistant's turn begins. `text` is the renderer's own."""

    token_ids: list[int]
    text: str


class Turned(NamedTuple):
    """A conversation after an assistant's turn: all its tokens, of which the last `num_sampled` were sampled, and the
    `Prompt.text` from before that turn."""

    token_ids: list[int]
    num_sampled: int
    text: str


class Renderer(Protocol):
    stop_token_ids: list[int]
    """Tokens that end an assistant's turn."""

    def start(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """Render a whole conversation.

        Raises:
            EpisodeFailed: the template refuses these messages.
        """
        ...

    def extend(self, before: Turned, messages: Sequence[Message], answer: int, tools: Tools) -> Prompt | None:
        """The tokens to append after an assistant's turn, up to where its next one begins.

        Args:
            before: what `messages[answer]` left.
            messages: the whole conversation.

        Returns:
            the further tokens, with the text of the whole; None when what was rendered before is not extended.
        """
        ...

    def answer(self, sampled: Sequence[int], stopped: bool, tools: Tools, prompt_ids: list[int]) -> Message:
        """The assistant's message; `stopped` when the turn ended by itself."""
        ...


_PROBES = (
    "Hello", "reverse: abcdef", "x", "7", "A sentence, with punctuation: (yes)!", "UPPER lower MiXed", "0123456789",
    "line one\nline two\n\nline four",
    "\u00fcn\u00efc\u00f6de \u6f22\u5b57 \U0001f642", "def f(x):\n    return {x: [1]}",
    "'single' \"double\" `back`", "-", "?", "...", "z" * 70, "word " * 400 + "end",
)  # fmt: skip
_SENTINEL = "qX{}Zq"
MAX_PATTERNS = 256
MAX_PROMPTS = 8192


class TemplateRenderer:
    """See the module. `prefix_stable` says whether plain conversations extend their own text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = _splitter(tokenizer.added)
        self._suspicious = finder(literals(tokenizer.template_source) | set(tokenizer.added))
        self._patterns: dict[tuple[str, ...], _Pattern | None] = {}
        self._prompts: dict[tuple[str, ...], Prompt] = {}
        self.end_of_turn = self._find_end_of_turn()
        """The token that the template puts after an assistant's words, if it is a single special one."""
        stops = set(tokenizer.eos_token_ids)
        if self.end_of_turn is not None:
            stops.add(self.end_of_turn)
        if not stops:
            raise UsageError(
                "neither the tokenizer nor its chat template has a token that ends a turn: set eos_token in "
                "tokenizer_config.json"
            )
        self.stop_token_ids = sorted(stops)
        self.prefix_stable = self._check_prefix()

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        if tools or not all(_is_plain(message) for message in messages):
            return self._render(messages, tools)
        roles = tuple(message.role for message in messages)
        key = (*roles, *(message.content for message in messages))
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._start(roles, [message.content for message in messages]) or self._render(messages, tools)
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.pop(next(iter(self._prompts)))
            self._prompts[key] = prompt
        return prompt

    def extend(self, before: Turned, messages: Sequence[Message], answer: int, tools: Tools = ()) -> Prompt | None:
        text = self._text(messages, tools)
        words = messages[answer].content
        # Many templates trim contents: the tokens that were sampled stay as they are, so that is no break.
        for variant in (words, words.strip(), words.rstrip(), words.lstrip()):
            known = before.text + variant
            if text.startswith(known):
                more = self._tokenizer.encode(text[len(known) :])
                # The template ends the assistant's turn; so did the model, unless it was cut off or ended otherwise.
                if more and more[0] == self.end_of_turn and before.token_ids[-1] == self.end_of_turn:
                    del more[0]
                return Prompt(more, text)
        return None

    def answer(
        self, sampled: Sequence[int], stopped: bool, tools: Tools = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        words = sampled[:-1] if stopped and sampled[-1] in self.stop_token_ids else sampled
        return Message("assistant", self._tokenizer.decode(words))

    def _render(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        text = self._text(messages, tools)
        return Prompt(self._tokenizer.encode(text), text)

    def _text(self, messages: Sequence[Message], tools: Tools) -> str:
        try:
            return self._tokenizer.render(messages, tools, prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise EpisodeFailed("template", f"the chat template refuses these messages ({roles}): {error}") from error

    # --- the short cut ----------------------------------------------------------------------------------------

    def _start(self, roles: tuple[str, ...], contents: list[str]) -> Prompt | None:
        for content in contents:
            if not content or content[0].isspace() or content[-1].isspace() or self._suspicious(content):
                return None
        if roles not in self._patterns:
            if len(self._patterns) >= MAX_PATTERNS:
                return None
            self._patterns[roles] = self._compile(roles)
        pattern = self._patterns[roles]
        return pattern.fill(contents, self._tokenizer) if pattern is not None else None

    def _compile(self, roles: tuple[str, ...]) -> _Pattern | None:
        """What the template writes around contents, if that is all it does with them; None otherwise."""
        sentinels = [_SENTINEL.format(index) for index in range(len(roles))]
        try:
            text = self._text([Message(*pair) for pair in zip(roles, sentinels)], ())
            pieces = _cut(text, sentinels)
            if pieces is None:
                return None
            pattern = _Pattern(pieces, self._special, self._tokenizer)
            for shift in range(len(_PROBES)):
                contents = [_PROBES[(shift + 3 * index) % len(_PROBES)] for index in range(len(roles))]
                expected = self._render([Message(*pair) for pair in zip(roles, contents)], ())
                if pattern.fill(contents, self._tokenizer) != expected:
                    return None
        except EpisodeFailed:
            return None
        return pattern

    # --- what the template is like ----------------------------------------------------------------------------

    def _find_end_of_turn(self) -> int | None:
        messages = [Message("user", "question"), Message("assistant", _SENTINEL)]
        try:
            text = self._tokenizer.render(messages, prompt=False)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template cannot render a question and its answer: {error}") from error
        after = text.rpartition(_SENTINEL)[2].lstrip()
        found = self._special.match(after)
        return self._tokenizer.added[found.group()] if found is not None else None

    def _check_prefix(self) -> bool:
        """Two synthetic conversations of three turns, with and without a system message."""
        turns = [Message("user", "first question"), Message("assistant", "first answer"), Message("user", "second")]
        turns += [Message("assistant", "second answer"), Message("user", "third")]
        for head in ([], [Message("system", "instructions")]):
            messages = head + turns
            try:
                for answer in (len(head) + 1, len(head) + 3):
                    before = Turned([-1], 0, self._text(messages[:answer], ()))
                    if self.extend(before, messages[: answer + 2], answer) is None:
                        log.warning(
                            "the chat template changes earlier turns when a conversation goes on: every further turn "
                            "starts another sample, and is trained with its whole history as a prompt"
                        )
                        return False
            except EpisodeFailed as error:
                if not head:
                    raise UsageError(str(error)) from error
        return True


class _Pattern:
    """The template's text for one sequence of roles, as spans between special tokens.

    A span is either token ids, or parts to join and tokenise: texts and indices of contents.
    """

    def __init__(self, pieces: list[str], special: re.Pattern[str], tokenizer: ChatTokenizer) -> None:
        self._pieces = pieces
        self._spans: list[_Ids | list[str | int]] = []
        open_parts: list[str | int] = []
        for index, piece in enumerate(pieces):
            if index:
                open_parts.append(index - 1)
            position = 0
            for match in special.finditer(piece):
                self._close(open_parts, piece[position : match.start()], tokenizer)
                open_parts = []
                self._constant([tokenizer.added[match.group()]])
                position = match.end()
            if position < len(piece):
                open_parts.append(piece[position:])
        self._close(open_parts, "", tokenizer)

    def _close(self, parts: list[str | int], text: str, tokenizer: ChatTokenizer) -> None:
        if text:
            parts = [*parts, text]
        if any(isinstance(part, int) for part in parts):
            self._spans.append(parts)
        elif parts:
            self._constant(tokenizer.encode("".join(str(part) for part in parts)))

    def _constant(self, token_ids: list[int]) -> None:
        last = self._spans[-1] if self._spans else None
        if isinstance(last, _Ids):
            last.extend(token_ids)
        else:
            self._spans.append(_Ids(token_ids))

    def fill(self, contents: Sequence[str], tokenizer: ChatTokenizer) -> Prompt:
        token_ids: list[int] = []
        for span in self._spans:
            if isinstance(span, _Ids):
                token_ids += span
            else:
                text = "".join([part if isinstance(part, str) else contents[part] for part in span])
                token_ids += tokenizer.encode(text)
        texts = [self._pieces[0]]
        for content, piece in zip(contents, self._pieces[1:]):
            texts += (content, piece)
        return Prompt(token_ids, "".join(texts))


class _Ids(list[int]):
    """Token ids of a constant span."""


def _cut(text: str, sentinels: Sequence[str]) -> list[str] | None:
    """The text before, between and after the sentinels, if each appears once and in order."""
    pieces: list[str] = []
    rest = text
    for sentinel in sentinels:
        if rest.count(sentinel) != 1:
            return None
        before, _, rest = rest.partition(sentinel)
        pieces.append(before)
    pieces.append(rest)
    return pieces if not any(sentinel in piece for piece in pieces for sentinel in sentinels) else None


def _splitter(added: Mapping[str, int]) -> re.Pattern[str]:
    texts = sorted((text for text in added if text), key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in texts) if texts else r"(?!)")


def _is_plain(message: Message) -> bool:
    return message.tool_calls is None and message.name is None and message.tool_call_id is None
