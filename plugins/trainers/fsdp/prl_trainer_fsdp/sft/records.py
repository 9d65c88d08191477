"""What a row must look like: a conversation, or a prompt and its completion.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"prompt": "..." or messages, "completion": "..." or messages, "tools": [...]}

Of a conversation every assistant turn is trained, of a prompt with its completion only the completion. A message may
say otherwise for itself: "train" is true or false; "weight", 1 or 0, is another spelling of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from prl.config.data import SftSourceTable

SHOWN = 60
"""Characters of a wrong value that a message shows."""

OTHER_NAMES = "Columns of other names: the keys messages, prompt and completion of [[data.train]] and [[data.eval]]"
"""What to do where the columns that are needed are missing."""


class BadRow(Exception):
    """A row is not what it should be: what was there, and what was expected."""


class Row(NamedTuple):
    """Row `number` of its source, from 1; `at` is what its reader finds it by; `value` a `BadRow` where it has none."""

    number: int
    at: int
    value: Any


@dataclass(frozen=True)
class Conversation:
    """`trained` has a flag for each message; only an assistant's turn has a true one, and at least one has."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Text:
    """Used as it is; `completion` is trained."""

    prompt: str
    completion: str


Record = Conversation | Text


def parse(row: object, columns: SftSourceTable) -> Record:
    """Raises: BadRow."""
    if not isinstance(row, Mapping):
        raise BadRow(f"it is {shown(row)}, not a table of columns")
    if row.get(columns.messages) is not None:
        messages = _messages(row[columns.messages], columns.messages)
        return _conversation(messages, [True] * len(messages), row.get(columns.tools), columns)
    prompt, completion = row.get(columns.prompt), row.get(columns.completion)
    if prompt is None or completion is None:
        raise BadRow(
            f"it has {_names(row)}; expected {columns.messages!r}, or {columns.prompt!r} and {columns.completion!r}. "
            f"{OTHER_NAMES}"
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        return Text(prompt, completion)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt, columns.prompt)
    turn = [{"role": "assistant", "content": completion}]
    after = turn if isinstance(completion, str) else _messages(completion, columns.completion)
    flags = [False] * len(before) + [True] * len(after)
    return _conversation([*before, *after], flags, row.get(columns.tools), columns)


def text_size(record: Record) -> int:
    """Characters of its texts: about what its number of tokens follows."""
    if isinstance(record, Text):
        return len(record.prompt) + len(record.completion)
    return sum(len(str(message["content"])) for message in record.messages)


def _conversation(messages: list[dict[str, Any]], flags: list[bool], tools: Any, columns: SftSourceTable) -> Record:
    trained = [
        _flag(index, message, message["role"] == "assistant" and flag)
        for index, (message, flag) in enumerate(zip(messages, flags, strict=True), 1)
    ]
    if not any(trained):
        roles = ", ".join(message["role"] for message in messages)
        raise BadRow(f"it has no token to train: its turns are {roles}, and no assistant's turn of them is trained")
    plain = [{key: value for key, value in message.items() if key not in _FLAGS} for message in messages]
    return Conversation(plain, trained, _tools(tools, columns.tools))


_FLAGS = ("train", "weight")


def _flag(index: int, message: Mapping[str, Any], default: bool) -> bool:
    """Whether a message is trained."""
    for name in _FLAGS:
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1):
            raise BadRow(f"message {index}: {name} is {shown(value)}; expected true or false, 1 or 0")
        if value and message["role"] != "assistant":
            raise BadRow(f"message {index}: {name} is {shown(value)} for the role {message['role']!r}: only an "
                         "assistant's turn can be trained")  # fmt: skip
        return bool(value)
    return default


def _messages(value: object, column: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"{column!r} is {shown(value)}; expected messages, a list of {{role, content}}")
    return [_message(index, message, column) for index, message in enumerate(value, 1)]


def _message(index: int, message: object, column: str) -> dict[str, Any]:
    where = f"message {index} of {column!r}"
    if not isinstance(message, Mapping):
        raise BadRow(f"{where} is {shown(message)}; expected {{role, content}}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        what = "has no role" if role is None else f"has the role {shown(role)}"
        raise BadRow(f"{where} {what}, only {_names(message)}; expected a role in words, such as user or assistant")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise BadRow(f"{where} has no content, only {_names(message)}; expected a text")
    if content is not None and not isinstance(content, str) and not _is_parts(content):
        raise BadRow(f"{where}: its content is {shown(content)}; expected a text, or a list of parts that have a type")
    return {**message, "content": "" if content is None else content}


def _is_parts(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("type"), str) for p in content)


def _tools(value: object, column: str) -> list[dict[str, Any]] | None:
    """A list of tables, or its JSON in a text: that is how tables of columns keep tools of different shapes."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow(f"{column!r} is no JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow(f"{column!r} is {shown(value)}; expected a list of tools, or its JSON")
    return [dict(tool) for tool in value] or None


def _names(row: Mapping[str, Any]) -> str:
    """The columns that hold something."""
    return ", ".join(repr(name) for name, value in row.items() if value is not None) or "nothing"


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({type(value).__name__})"
