"""Which tokens are trained: by the chat template, and by the library `renderers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prl.config.data import SftSourceTable
from prl.errors import ConfigError, EnvironmentNotFit
from prl_trainer_fsdp.sft import library
from prl_trainer_fsdp.sft.records import BadRow, parse
from prl_trainer_fsdp.sft.rendering import Example, Renderer, TemplateRenderer, choose, load_tokenizer

from .sft_helpers import TEMPLATE, save_tokenizer, turns

COLUMNS = SftSourceTable(path="data.jsonl")
FORGETFUL = (
    "{%- for m in messages -%}"
    "{%- if m['role'] != 'assistant' or loop.last -%}{{- m['content'] + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
)
WITH_TOOLS = "{%- for t in tools -%}{{- t['name'] + '.' -}}{%- endfor -%}" + TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(out)
    return out


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


def trained_text(tokenizer: Any, row: dict[str, Any], renderer: Renderer | None = None) -> tuple[str, str]:
    """The whole text, and what of it is trained."""
    (encoded,) = (renderer or TemplateRenderer(tokenizer)).encode([parse(row, COLUMNS)])
    assert isinstance(encoded, Example), encoded
    whole = tokenizer.convert_ids_to_tokens(encoded.token_ids.tolist())
    return "".join(whole), "".join(t for t, trained in zip(whole, encoded.trained.tolist(), strict=True) if trained)


def test_assistant_turns_are_trained_with_their_end_and_no_further(tokenizer: Any) -> None:
    whole, trained = trained_text(tokenizer, {"messages": turns("ab", "cd", "ef", "gh")})
    assert whole == "<|user|>ab<|end|>\n<|assistant|>cd<|end|>\n<|user|>ef<|end|>\n<|assistant|>gh<|end|>\n"
    assert trained == "cd<|end|>gh<|end|>"


def test_a_plain_completion_is_trained_with_the_end_of_sequence(tokenizer: Any) -> None:
    assert trained_text(tokenizer, {"prompt": "abc", "completion": "de"}) == ("abcde<|end|>", "de<|end|>")
    assert trained_text(tokenizer, {"prompt": "", "completion": "de"})[1] == "e<|end|>", "nothing predicts the first"


def test_of_a_prompt_only_the_completion_is_trained(tokenizer: Any) -> None:
    assert trained_text(tokenizer, {"prompt": turns("ab"), "completion": "cd"})[1] == "cd<|end|>"
    assert trained_text(tokenizer, {"prompt": turns("a", "b", "c"), "completion": "d"})[1] == "d<|end|>"
    both = {"prompt": "a", "completion": turns("x", "b")[1:]}
    assert (
        trained_text(tokenizer, both)[0].startswith("<|user|>a<|end|>")
        and trained_text(tokenizer, both)[1] == "b<|end|>"
    )


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}])
def test_a_message_may_say_that_it_is_not_trained(tokenizer: Any, flag: dict[str, Any]) -> None:
    messages = turns("ab", "cd", "ef", "gh")
    messages[1] |= flag
    assert trained_text(tokenizer, {"messages": messages})[1] == "gh<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused_where_they_are_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    messages = turns("ab", "cd", "ef", "gh")
    (found,) = TemplateRenderer(tokenizer).encode([parse({"messages": messages}, COLUMNS)])
    assert isinstance(found, BadRow) and "writes turn 2 differently" in str(found)
    messages[1]["train"] = False
    assert trained_text(tokenizer, {"messages": messages})[1] == "gh<|end|>"


def test_tools_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = WITH_TOOLS
    tools = [{"name": "add"}]
    for given in (tools, json.dumps(tools)):
        assert trained_text(tokenizer, {"messages": turns("a", "b"), "tools": given})[0].startswith("add.<|user|>a")


def test_a_tokenizer_without_template_takes_no_conversation(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        TemplateRenderer(tokenizer).encode([parse({"messages": turns("a", "b")}, COLUMNS)])
    assert trained_text(tokenizer, {"prompt": "a", "completion": "b"})[1] == "b<|end|>"


def test_one_example_does_not_depend_on_the_others(tokenizer: Any) -> None:
    rows = [
        {"messages": turns("ab", "cd")},
        {"prompt": "x", "completion": "y"},
        {"messages": turns("e", "f", "g", "h")},
    ]
    records = [parse(row, COLUMNS) for row in rows]
    together = TemplateRenderer(tokenizer).encode(records)
    alone = [TemplateRenderer(tokenizer).encode([record])[0] for record in records]
    for a, b in zip(together, alone, strict=True):
        assert isinstance(a, Example) and isinstance(b, Example) and a.token_ids.tolist() == b.token_ids.tolist()


# --- the library -------------------------------------------------------------------------------------------------

QWEN = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>",
]  # fmt: skip


@pytest.fixture(scope="module")
def qwen() -> Any:
    """A byte tokenizer with the special tokens of Qwen3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(QWEN)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def needs_library() -> None:
    pytest.importorskip("renderers", reason="the renderers library is optional", exc_type=ImportError)


def test_the_library_knows_a_model_by_its_name(qwen: Any) -> None:
    needs_library()
    assert "qwen3" in choose(qwen, "Qwen/Qwen3-0.6B", "auto").name
    assert "template" in choose(qwen, "some/folder", "auto").name
    assert "template" in choose(qwen, "Qwen/Qwen3-0.6B", "template").name
    assert "qwen3" in choose(qwen, "some/folder", "qwen3").name


def test_the_library_says_what_is_trained(qwen: Any) -> None:
    needs_library()
    renderer = choose(qwen, "some/folder", "qwen3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "0"},
        {"role": "assistant", "content": "it is two"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    whole, trained = trained_text(qwen, {"messages": messages, "tools": tools}, renderer)
    assert "<tools>" in whole and "two" in whole
    called, _, said = trained.partition("<|im_end|>")
    assert called.endswith("</tool_call>") and '"add"' in called and "two" not in called
    assert said.endswith("two<|im_end|>") and "<|im_start|>" not in trained and "one?" not in trained
    messages[1]["train"] = False
    assert "<tool_call>" not in trained_text(qwen, {"messages": messages, "tools": tools}, renderer)[1]
    assert trained_text(qwen, {"prompt": "a", "completion": "b"}, renderer)[1] == "b<|im_end|>"


def test_a_renderer_that_is_unknown_or_does_not_fit_is_refused(qwen: Any, tokenizer: Any) -> None:
    needs_library()
    with pytest.raises(ConfigError, match="data.renderer = 'qwen33'.*qwen3,"):
        choose(qwen, "some/folder", "qwen33")
    with pytest.raises(ConfigError, match="does not fit the model's tokenizer.*im_start"):
        choose(tokenizer, "some/folder", "qwen3")


def test_without_the_library(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(library.importlib, "import_module", missing)
    assert "template" in choose(qwen, "Qwen/Qwen3-0.6B", "auto").name
    with pytest.raises(EnvironmentNotFit, match=r'pip install "prl-trainer-fsdp\[renderers\]"'):
        choose(qwen, "Qwen/Qwen3-0.6B", "qwen3")
