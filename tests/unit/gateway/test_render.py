"""Rendering: the short cut equals the template, extension equals rendering everything, breaks are seen."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prl.errors import EpisodeFailed, UsageError
from prl.types import Message
from prl_gateway import template as templates
from prl_gateway.render import TemplateRenderer, Turned
from prl_gateway.template import ChatTokenizer

CONTENTS = [
    "abc", "a", "", " leading", "trailing \n", "\nabab", "ab<|end|>cd", "<think>x</think>y", "user", "{{ m }}",
    "caf\u00e9 \u6f22", "x" * 500, "1 + 1 = 2", "\n\n\na", "assistant\n", "</THINK>",
]  # fmt: skip


def test_short_cut_equals_template(any_tokenizer: ChatTokenizer) -> None:
    renderer = TemplateRenderer(any_tokenizer)
    rng = random.Random(0)
    for _ in range(300):
        roles = rng.choice([("user",), ("system", "user"), ("user", "assistant", "user")])
        messages = [Message(role, rng.choice(CONTENTS)) for role in roles]
        text = any_tokenizer.render(messages, prompt=True)
        for _ in range(2):  # the second time from the cache
            assert renderer.start(messages) == (any_tokenizer.encode(text), text)
    assert any(pattern is not None for pattern in renderer._patterns.values())


def test_short_cut_is_refused_to_a_template_that_looks_into_contents(kit: Any) -> None:
    source = "{% for m in messages %}{% set c = m.content %}{{ c | upper if c | length > 60 else c }}<|sep|>"
    source += "{% endfor %}{% if messages[-1].role == 'assistant' %}<|end|>{% endif %}"
    renderer = TemplateRenderer(kit.tokenizer(source))
    messages = [Message("user", "long " * 30)]
    assert renderer.start(messages).text == ("LONG " * 30) + "<|sep|>"
    assert renderer._patterns.get(("user",)) is None


def test_end_of_turn_and_stops(kit: Any) -> None:
    for source in (kit.PLAIN, kit.CHATML, kit.TRIMMING, kit.STRIPS_THINKING):
        tokenizer = kit.tokenizer(source)
        renderer = TemplateRenderer(tokenizer)
        assert renderer.end_of_turn == tokenizer.added["<|end|>"]
        assert renderer.stop_token_ids == sorted({tokenizer.added["<|end|>"], tokenizer.added["<|eos|>"]})
        assert renderer.prefix_stable


def test_extension_is_what_the_template_adds(any_tokenizer: ChatTokenizer) -> None:
    renderer = TemplateRenderer(any_tokenizer)
    messages = [Message("user", "first"), Message("assistant", " an answer\n"), Message("user", "second")]
    before = renderer.start(messages[:1])
    added = renderer.extend(Turned([-1], 0, before.text), messages, 1)
    assert added is not None
    whole = any_tokenizer.render(messages, prompt=True)
    assert added.text == whole
    assert whole.endswith(any_tokenizer.decode(added.token_ids))
    assert any_tokenizer.decode(added.token_ids).startswith("<|end|>")
    ended = renderer.extend(Turned([renderer.end_of_turn or 0], 1, before.text), messages, 1)
    assert ended is not None
    assert ended.token_ids == added.token_ids[1:]


def test_a_template_that_strips_reasoning_breaks_its_prefix(kit: Any) -> None:
    renderer = TemplateRenderer(kit.tokenizer(kit.STRIPS_THINKING))
    messages = [Message("user", "q"), Message("assistant", "<think>hm</think>\nanswer"), Message("user", "again")]
    before = Turned([-1], 0, renderer.start(messages[:1]).text)
    assert renderer.extend(before, messages, 1) is None
    messages[1] = Message("assistant", "no reasoning")
    assert renderer.extend(before, messages, 1) is not None


def test_template_that_refuses(kit: Any) -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + kit.PLAIN
    renderer = TemplateRenderer(kit.tokenizer(source))
    assert renderer.prefix_stable
    with pytest.raises(EpisodeFailed, match="no system here") as caught:
        renderer.start([Message("system", "x"), Message("user", "y")])
    assert caught.value.reason == "template"


def test_loading_a_folder(kit: Any, tmp_path: Path) -> None:
    kit.write_tokenizer(tmp_path / "model")
    tokenizer = templates.load(str(tmp_path / "model"))
    assert tokenizer.context == 64
    assert tokenizer.eos_token_ids == (tokenizer.added["<|eos|>"],)
    assert tokenizer.render([Message("user", "hi")], prompt=True) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="no chat template"):
        templates.load(str(tmp_path / "model"))
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        templates.load(str(tmp_path / "model"))


def test_same_text_as_transformers(kit: Any, tmp_path: Path) -> None:
    """The sandbox, its globals and filters are transformers' own, but for the import of torch."""
    from transformers import PreTrainedTokenizerFast

    source = (
        "{{- bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}\n  {%- for m in messages %}"
        "{%- if loop.index0 == 3 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}<|end|>\n"
        "{%- endfor %}\n{% if add_generation_prompt %}<|sep|>{% endif %}"
    )
    kit.write_tokenizer(tmp_path, source)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|start|>", chat_template=source
    )
    ours = templates.load(str(tmp_path))
    messages = [Message("user", "one"), Message("assistant", "t\u00e9st \u6f22"), Message("user", "<b> & 'c'")]
    tools = [{"type": "function", "function": {"name": "f\u00fcnf", "parameters": {"a": [1, 2]}}}]
    plain = [{"role": m.role, "content": m.content} for m in messages]
    for given in ([], tools):
        expected = theirs.apply_chat_template(plain, tools=given or None, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages, given, prompt=True) == expected


def test_gateway_imports_no_torch() -> None:
    code = (
        "import sys, prl_gateway.__main__, prl_engine_embedded.engine; "
        "bad = {'torch', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
