"""A model's tokenizer and chat template, without torch: importing transformers for it would cost 4 s and 400 MB.

The template runs in the same sandbox, with the same globals and filters, as in transformers'
`PreTrainedTokenizerBase.apply_chat_template`; text becomes tokens through the `tokenizers` library directly, with no
special tokens added, as there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from prl.errors import UsageError
from prl.types import Message

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")


class ChatTokenizer:
    """Text to tokens and back, and messages to text.

    Args:
        backend: the fast tokenizer.
        template: source of the chat template.
        special: names to texts, such as {"eos_token": "</s>"}; a template may use them.
        eos_token_ids: tokens that end a generation, from the model's own files.
        context: longest sequence of the model, None when its configuration does not say.
    """

    def __init__(
        self,
        backend: Tokenizer,
        template: str,
        special: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        context: int | None = None,
    ) -> None:
        self._backend = backend
        self._special = dict(special)
        self.template_source = template
        self.eos_token_ids = tuple(eos_token_ids)
        self.context = context
        self.added = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        self._template = _environment().from_string(template)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens stay visible: what a model wrote must not look better than it is."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, prompt: bool) -> str:
        """The conversation as text; with `prompt`, up to where the assistant's next turn begins.

        Raises:
            jinja2.TemplateError: the template refuses these messages.
        """
        return self._template.render(
            messages=[_as_dict(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=prompt,
            **self._special,
        )


def load(path: str) -> ChatTokenizer:
    """Load from a local folder, or from a model hub by name.

    Raises:
        UsageError: no fast tokenizer, or no chat template.
    """
    folder = Path(path) if Path(path).is_dir() else _download(path)
    if not (folder / "tokenizer.json").exists():
        raise UsageError(
            f"model.path: {path} has no tokenizer.json: load it with transformers' AutoTokenizer and save_pretrained it"
        )
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = _read(folder / "tokenizer_config.json")
    special = {
        name: _text(value) for name, value in config.items() if name.endswith("_token") and _text(value) is not None
    }
    eos = _eos_ids(folder, backend, special.get("eos_token"))
    limit = _read(folder / "config.json").get("max_position_embeddings")
    return ChatTokenizer(
        backend, _template_source(folder, config, path), special, eos, limit if isinstance(limit, int) else None
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:
        raise UsageError(f"model.path: {name!r} is no local folder, and no model hub has it: {error}") from error


def _template_source(folder: Path, config: Mapping[str, Any], path: str) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise UsageError(
            f"model.path: the tokenizer of {path} has no chat template: write one into chat_template.jinja beside it"
        )
    return source


def _eos_ids(folder: Path, backend: Tokenizer, eos_token: str | None) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read(folder / name).get("eos_token_id")
        found.extend(value if isinstance(value, list) else [] if value is None else [value])
    number = backend.token_to_id(eos_token) if eos_token is not None else None
    if number is not None:
        found.append(number)
    return sorted(set(found))


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _as_dict(message: Message) -> dict[str, Any]:
    if message.tool_calls is None and message.name is None and message.tool_call_id is None:
        return {"role": message.role, "content": message.content}
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if "tool_calls" in plain:
        plain["tool_calls"] = [dict(call) for call in plain["tool_calls"]]
    return plain


# --- the template's sandbox -----------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's words; here it just passes them through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


# --- what a template may look for in a message ----------------------------------------------------------------


def literals(source: str) -> set[str]:
    """Every text a template may compare a message's content with: its string constants, except for names of fields and
    roles and for whitespace."""
    tree = _environment().parse(source)
    ignored = {id(node.arg) for node in tree.find_all(jinja2.nodes.Getitem)}
    for comparison in tree.find_all(jinja2.nodes.Compare):
        if _field(comparison.expr) == "role":
            ignored.update(id(operand.expr) for operand in comparison.ops)
    return {
        node.value
        for node in tree.find_all(jinja2.nodes.Const)
        if isinstance(node.value, str) and node.value.strip() and id(node) not in ignored
    }


def _field(node: jinja2.nodes.Node) -> str | None:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
        return str(node.arg.value)
    return None


def finder(texts: set[str]) -> Callable[[str], object]:
    """A function that is true for a text that holds any of `texts`, in upper or lower case."""
    if not texts:
        return lambda text: False
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)), re.IGNORECASE).search
