"""A byte-level tokenizer with a few merges, some chat templates, and an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prl.messages import EngineHealth, GenerateRequest, Generation, Installed, WeightsRef
from prl_gateway.template import ChatTokenizer

PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|end|>{% else %}{{ m.content }}<|sep|>"
    "{% endif %}{% endfor %}"
)
CHATML = (
    "{%- for message in messages %}{{- '<|start|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"
)
TRIMMING = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start|>' + message.role + '\n\n' + message.content | trim "
    "+ '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant\n\n' }}{%- endif %}"
)
STRIPS_THINKING = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|start|>' + message.role + '\n' + content + '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"
)
TEMPLATES = {"plain": PLAIN, "chatml": CHATML, "trimming": TRIMMING, "strips_thinking": STRIPS_THINKING}
SPECIAL = ["<|pad|>", "<|end|>", "<|sep|>", "<|start|>", "<|eos|>"]


def make_backend(*, use_regex: bool = False) -> Tokenizer:
    """256 bytes, the merges "a"+"b", "ab"+"c" and newline+newline, and the special tokens."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("\u010a", "\u010a"), ("\u010a", "a")]
    vocabulary = {text: index for index, text in enumerate([*symbols, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


def make_tokenizer(template: str, **options: Any) -> ChatTokenizer:
    backend = make_backend(**options)
    special = {"eos_token": "<|eos|>", "pad_token": "<|pad|>", "bos_token": "<|start|>"}
    return ChatTokenizer(backend, template, special, [backend.token_to_id("<|eos|>")], None)


@pytest.fixture(params=sorted(TEMPLATES))
def any_tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    return make_tokenizer(TEMPLATES[request.param])


@pytest.fixture
def tokenizer() -> ChatTokenizer:
    return make_tokenizer(CHATML)


Answer = Callable[[GenerateRequest], Generation]


def says(tokens: Sequence[int], stop: Any = "stop", version: int = 0) -> Generation:
    count = len(tokens)
    return Generation(list(tokens), [-0.5] * count, [version] * count, stop)


class ScriptedEngine:
    """An `EngineClient` whose answers are the test's. An answer that is an exception is raised."""

    def __init__(self, *answers: Generation | Exception, delay_s: float = 0.0) -> None:
        self.answers = list(answers)
        self.requests: list[GenerateRequest] = []
        self.delay_s = delay_s
        self.aborted: list[str] = []
        self.closed = False

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise NotImplementedError

    async def pause(self) -> None: ...

    async def install(self, weights: WeightsRef) -> Installed:
        return Installed()

    async def resume(self) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(0, 0, False, 0, 0.0)

    async def close(self) -> None:
        self.closed = True


def write_tokenizer(folder: Path, template: str = CHATML) -> None:
    """The files of a model folder that the gateway reads."""
    folder.mkdir(parents=True, exist_ok=True)
    make_backend().save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|eos|>"}, "pad_token": "<|pad|>", "bos_token": "<|start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "eos_token_id": None}))


class Kit:
    """What the tests of this folder share: a test module cannot import a conftest."""

    PLAIN, CHATML, TRIMMING, STRIPS_THINKING = PLAIN, CHATML, TRIMMING, STRIPS_THINKING
    tokenizer = staticmethod(make_tokenizer)
    says = staticmethod(says)
    ScriptedEngine = ScriptedEngine
    write_tokenizer = staticmethod(write_tokenizer)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
