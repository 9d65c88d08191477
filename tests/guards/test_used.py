"""What is declared is used: keys of the configuration, hooks, messages, protocols. Each rule looks for the name in the
code that should use it, so a dead one cannot stay unseen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pydantic import BaseModel

from prl import hookspecs, launching, messages, protocols
from prl.config import data, schema

if TYPE_CHECKING:
    from conftest import Distribution

DECLARING = (
    "core/prl/config/schema.py",
    "core/prl/messages.py",
    "core/prl/launching.py",
    "core/prl/protocols.py",
    "core/prl/hookspecs.py",
)
MESSAGES = vars(messages) | vars(launching)
FOR_PLUGINS = {"session", "num_prompt_tokens"}
"""Fields that are there for engines and environments other than ours."""
BY_RULE = {"top_p", "top_k"}
"""Keys that exist to be refused with their reason."""


def text_of_code(distributions: list[Distribution], root: Path) -> str:
    """All code of the distributions but tests' helpers and the declarations themselves."""
    return "\n".join(
        path.read_text()
        for dist in distributions
        for path in dist.sources()
        if str(path.relative_to(root)) not in DECLARING and "testing" not in path.parts
    )


def tables() -> Iterator[type[BaseModel]]:
    for found in {**vars(schema), **vars(data)}.values():
        if isinstance(found, type) and issubclass(found, schema.Table | schema.PluginTable):
            yield found


def test_every_key_of_the_configuration_has_a_consumer(distributions: list[Distribution], root: Path) -> None:
    text = text_of_code(distributions, root) + (root / "core/prl/config/schema.py").read_text()
    keys = {key for table in tables() for key in table.model_fields} - BY_RULE
    unused = [key for key in sorted(keys) if not re.search(rf"\.{key}\b|getattr\(.*\b{key}\b", text)]
    assert unused == []


def test_every_hook_has_an_emitter(distributions: list[Distribution], root: Path) -> None:
    text = text_of_code(distributions, root)
    hooks = [name for name in vars(hookspecs) if name.startswith("prl_")]
    assert hooks and [hook for hook in hooks if f'"{hook}"' not in text] == []


def test_every_method_of_the_wire_has_a_caller_and_a_handler(distributions: list[Distribution], root: Path) -> None:
    text = text_of_code(distributions, root)
    methods = [name for name, found in MESSAGES.items() if isinstance(found, messages.Method)]
    assert methods
    for name in methods:
        assert re.search(rf"\b(call|notify)\((methods\.)?{name}\b", text), f"nobody calls {name}"
        assert re.search(rf"\b{name}: ", text), f"nobody handles {name}"


def test_every_field_of_a_message_is_read(distributions: list[Distribution], root: Path) -> None:
    text = text_of_code(distributions, root)
    unread = [
        f"{struct.__name__}.{field}"
        for struct in MESSAGES.values()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        for field in struct.__struct_fields__
        if field not in FOR_PLUGINS and not re.search(rf"\.{field}\b", text)
    ]
    assert unread == []


def test_every_method_of_a_protocol_is_called(distributions: list[Distribution], root: Path) -> None:
    """By the core, or by a plugin of ours through the registry. Of an engine's client also by the contract suite."""
    text = text_of_code(distributions, root)
    contract = (root / "core/prl/testing/contracts/engine.py").read_text()
    for protocol in vars(protocols).values():
        if isinstance(protocol, type) and getattr(protocol, "_is_protocol", False):
            named = [name for name, found in vars(protocol).items() if not name.startswith("_") and callable(found)]
            allowed = text + contract if protocol is protocols.EngineClient else text
            assert [name for name in named if not re.search(rf"\.{name}\(", allowed)] == [], protocol.__name__
