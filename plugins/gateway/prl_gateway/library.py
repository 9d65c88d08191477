"""The `renderers` library behind this gateway's `Renderer`, for models whose format it knows by name.

It knows how such a model's turns follow one another without rendering them, and parses tool calls and reasoning; a chat
template can do neither. It is optional: `pip install "prl-gateway[renderers]"`. A model is known by its
name on the hub only, so a local folder uses its chat template.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from prl.errors import EpisodeFailed
from prl.types import Message
from prl_gateway.render import Prompt, Renderer, TemplateRenderer, Tools, Turned
from prl_gateway.template import ChatTokenizer

log = logging.getLogger(__name__)


def choose(tokenizer: ChatTokenizer, name: str) -> Renderer:
    """The library's renderer where it is installed and knows the model `name`; the chat template's otherwise.

    Raises:
        UsageError: the chat template cannot be used.
    """
    try:
        from renderers import base
    except ImportError:
        return TemplateRenderer(tokenizer)
    base._populate_registry()
    if name not in base.MODEL_RENDERER_MAP:
        return TemplateRenderer(tokenizer)
    log.info("conversations are rendered by the renderers library: %s", base.MODEL_RENDERER_MAP[name])
    return LibraryRenderer(base.create_renderer(PlainTokenizer(tokenizer, name)))


class PlainTokenizer:
    """What the library wants of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        self.unk_token_id: int | None = None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.added.get(tokens)
        return [self._tokenizer.added.get(token) for token in tokens]


class LibraryRenderer:
    """See `Renderer`. `library` is one of the library's own renderers."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.stop_token_ids: list[int] = sorted(library.get_stop_token_ids())

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        try:
            rendered = self._library.render(
                [_plain(message) for message in messages], tools=list(tools) or None, add_generation_prompt=True
            )
        except Exception as error:
            raise EpisodeFailed("template", f"these messages cannot be rendered: {error}") from error
        return Prompt(list(rendered.token_ids), "")

    def extend(self, before: Turned, messages: Sequence[Message], answer: int, tools: Tools = ()) -> Prompt | None:
        boundary = len(before.token_ids) - before.num_sampled
        try:
            bridged = self._library.bridge_to_next_turn(
                before.token_ids[:boundary],
                before.token_ids[boundary:],
                [_plain(message) for message in messages[answer + 1 :]],
                tools=list(tools) or None,
            )
        except Exception as error:
            raise EpisodeFailed("template", f"these messages cannot be rendered: {error}") from error
        if bridged is None:
            return None
        tokens = list(bridged.token_ids)
        if tokens[: len(before.token_ids)] != before.token_ids:
            return None
        return Prompt(tokens[len(before.token_ids) :], "")

    def answer(
        self, sampled: Sequence[int], stopped: bool, tools: Tools = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        parsed = self._library.parse_response(list(sampled), tools=list(tools) or None, prompt_ids=list(prompt_ids))
        calls = tuple(
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": _as_text(call.arguments)},
            }
            for index, call in enumerate(parsed.tool_calls)
            if getattr(call.status, "value", call.status) == "ok"
        )
        return Message("assistant", parsed.content, tool_calls=calls or None)


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if "tool_calls" in plain:
        plain["tool_calls"] = [dict(call) for call in plain["tool_calls"]]
    return plain
