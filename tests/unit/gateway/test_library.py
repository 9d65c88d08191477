"""The renderers library where it is installed: exact extension where a template would break, tool calls parsed."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prl.types import Message, Sampling
from prl_gateway import library
from prl_gateway.conversation import Conversation
from prl_gateway.render import TemplateRenderer
from prl_gateway.template import ChatTokenizer

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
]  # fmt: skip


@pytest.fixture
def tokenizer(kit: Any) -> ChatTokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return ChatTokenizer(backend, kit.CHATML.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>"), {})


def test_unknown_models_use_their_template(tokenizer: ChatTokenizer) -> None:
    assert isinstance(library.choose(tokenizer, "some/folder"), TemplateRenderer)


def test_a_known_model(kit: Any, tokenizer: ChatTokenizer) -> None:
    pytest.importorskip("renderers", reason="the renderers library is optional", exc_type=ImportError)
    renderer = library.choose(tokenizer, "Qwen/Qwen3-0.6B")
    assert isinstance(renderer, library.LibraryRenderer)
    end = tokenizer.added["<|im_end|>"]
    assert end in renderer.stop_token_ids
    conversation = Conversation()
    call = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
    turns: list[tuple[Message, str, str]] = [
        (Message("user", "one plus one?"), call, "stop"),
        (Message("tool", "2", tool_call_id="call_0"), "it is", "length"),
        (Message("user", "thanks"), "<think>\n\n</think>\n\nbye", "stop"),
    ]
    for message, text, stop in turns:
        pending = conversation.prepare(len(conversation.messages), [message], Sampling(), renderer, tools)
        sampled = tokenizer.encode(text) + ([end] if stop == "stop" else [])
        conversation.commit(pending, kit.says(sampled, stop), renderer)
    first = conversation.messages[1]
    assert first.tool_calls is not None
    assert first.tool_calls[0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert conversation.messages[-1].content == "bye"
    # A tool's answer extends the turn; a new question drops the reasoning before it, as this model's format wants.
    assert (len(conversation.segments), conversation.forks) == (2, 1)
    whole = tokenizer.decode(conversation.segments[0].ids)
    assert whole.index(call) < whole.index("2\n</tool_response>") < whole.index("it is")
    again = tokenizer.decode(conversation.segments[1].ids)
    assert "hm" not in again
    assert again.endswith("bye<|im_end|>")
