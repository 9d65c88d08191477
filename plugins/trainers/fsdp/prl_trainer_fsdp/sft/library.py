"""The library `renderers` writes the format of models that it knows, and says of every token whether the model would
have sampled it. That is the mask: turns are never found again in text, and nothing is encoded twice.

It is optional: `pip install "prl-trainer-fsdp[renderers]"`. It knows a model by its name on the hub only, as a
fine-tuned one in a local folder may have another template; `data.renderer` names its renderer then.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from prl.errors import ConfigError, EnvironmentNotFit
from prl_trainer_fsdp.sft.records import BadRow, Record, Text
from prl_trainer_fsdp.sft.rendering import Example, Renderer, TemplateRenderer

log = logging.getLogger(__name__)


def known(tokenizer: Any, path: str) -> Renderer | None:
    """The library's renderer, where it is installed and knows the model."""
    try:
        base = importlib.import_module("renderers.base")
    except ImportError:
        return None
    if path not in base.MODEL_RENDERER_MAP:
        return None
    return named(tokenizer, base.MODEL_RENDERER_MAP[path])


def named(tokenizer: Any, name: str) -> Renderer:
    """Raises: ConfigError: there is none of that name, or the tokenizer lacks its tokens. EnvironmentNotFit."""
    try:
        base, configs = importlib.import_module("renderers.base"), importlib.import_module("renderers.configs")
    except ImportError as error:
        raise EnvironmentNotFit(
            f"data.renderer = {name!r} needs the library renderers, which cannot be imported ({error}): "
            'pip install "prl-trainer-fsdp[renderers]"'
        ) from error
    names = sorted(set(base.MODEL_RENDERER_MAP.values()))
    if name not in names:
        raise ConfigError([f'data.renderer = {name!r}: expected "auto", "template", or one of {", ".join(names)}'])
    try:
        library = base.create_renderer(tokenizer, configs.config_from_name(name))
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"data.renderer = {name!r} does not fit the model's tokenizer: {error}"]) from error
    return LibraryRenderer(tokenizer, library, name)


class LibraryRenderer:
    """See the module. Plain prompts and completions do not concern it."""

    def __init__(self, tokenizer: Any, library: Any, name: str) -> None:
        self.name = f"the library renderers ({name})"
        self._library = library
        self._plain = TemplateRenderer(tokenizer)
        self._sample: Any = importlib.import_module("renderers.base").build_training_sample

    def encode(self, records: Sequence[Record]) -> list[Example | BadRow]:
        return [self._encoded(record) for record in records]

    def _encoded(self, record: Record) -> Example | BadRow:
        if isinstance(record, Text):
            return self._plain.encode([record])[0]
        try:
            sample = self._sample(
                self._library,
                record.messages,
                tools=record.tools,
                ensure_final_stop=True,
                message_loss_mask=record.trained,
            )
        except Exception as error:  # whatever the library says of these messages is about these messages
            return BadRow(f"{self.name} refuses it: {type(error).__name__}: {error}")
        return Example.of(sample.token_ids, sample.loss_mask)
