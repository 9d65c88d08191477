"""From the `[engine]` table to the arguments of `vllm serve`, checked by vLLM's own parser. Runs where vLLM is."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.adapters import Adapter, published
from prl.errors import ConfigError
from prl_engine_vllm import adapters
from prl_engine_vllm.config import VllmConfig

if TYPE_CHECKING:
    from argparse import Namespace

    from prl.config.schema import RunConfig

LARGEST_SEED = 2**31
IN_PARTS = ("enable_chunked_prefill", "long_prefill_token_threshold")
"""Arguments that have a prompt computed in parts. The second does even where the first is false."""


class Refused(Exception):
    """vLLM does not take the arguments. `key` is the one that is wrong, "" where vLLM does not say."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def complete(config: RunConfig, own: VllmConfig, replica: int = 0) -> dict[str, Any]:
    """Every argument that vLLM gets, by its name with underscores: the user's and what prl decides."""
    adapter = published(config)
    defaults: dict[str, Any] = {
        "scheduling_policy": "priority",
        "served_model_name": [Path(config.model.path).name or config.model.path],
    }
    fixed = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "seed": (config.seed + replica) % LARGEST_SEED,  # of requests over HTTP that name none
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled, after the temperature
        "generation_config": "vllm",
        "worker_extension_cls": "prl_engine_vllm.worker.WorkerExtension",
        "host": own.api_host,
        "port": own.api_port + replica if own.api_port else 0,
    }
    if config.engine.sleep:
        fixed["enable_sleep_mode"] = True
    return defaults | _for_adapters(adapter, config) | own.arguments | fixed


def _for_adapters(adapter: Adapter | None, config: RunConfig) -> dict[str, Any]:
    return {} if adapter is None else adapters.arguments(adapter, config.loop.max_staleness)


def fitted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for the device that is here.

    On a CPU prompts are not computed in parts: vLLM sets a request's random stream back after each part but the last,
    which streams of a CPU cannot be ("CPU Generator does not use offset"), and its engine core would end. Every
    request of ours has a stream of its own, and so has one over HTTP that names a seed.

    Raises:
        Refused: it is asked for.
    """
    if not _on_cpu():
        return dict(arguments)
    for key in IN_PARTS:
        if arguments.get(key):
            raise Refused(
                "cannot be set on a CPU: it has prompts computed in parts, which vLLM cannot do there for a request "
                "with a random stream of its own",
                key,
            )
    return {**arguments, "enable_chunked_prefill": False}


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def parse(arguments: Mapping[str, Any]) -> Namespace:
    """vLLM's namespace of these arguments, as `vllm serve` would have it.

    Raises:
        Refused: vLLM's parser does not take them.
    """
    parser = _parser()
    known = _known(parser)
    argv: list[str] = []
    for key, value in arguments.items():
        action = known.get(key)
        if action is None:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "`vllm serve --help=all` lists them"
            raise Refused(f"is neither a key of this engine nor an argument of `vllm serve`; {hint}", key)
        argv += _words(key, value, action)

    def refuse(message: str) -> None:
        raise Refused(f"vLLM refuses it: {_one_line(message)}", _culprit(message, arguments))

    parser.error = refuse
    namespace: Namespace = parser.parse_args(argv)
    return namespace


def _parser() -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.30
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve", allow_abbrev=False))


def _known(parser: Any) -> dict[str, Any]:
    """Every argument's action by its name with underscores, the negations left out."""
    found = {}
    for action in parser._actions:
        for option in action.option_strings:
            name = option.lstrip("-").replace("-", "_")
            if option.startswith("--") and not (name.startswith("no_") and name[3:] in found):
                found[name] = action
    return found


def _words(key: str, value: Any, action: Any) -> list[str]:
    """The words of one argument. A table, and an array where vLLM takes JSON, are written as JSON."""
    flag = "--" + key.replace("_", "-")
    if isinstance(value, bool) and action.nargs == 0:
        negation = "--no-" + key.replace("_", "-")
        if value:
            return [flag]
        return [negation] if negation in action.option_strings else []
    if isinstance(value, list) and action.nargs in ("*", "+"):
        return [flag, *(item if isinstance(item, str) else json.dumps(item) for item in value)]
    if isinstance(value, dict | list | bool):
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]


def _culprit(message: str, arguments: Mapping[str, Any]) -> str:
    """argparse says "argument --some-key: ..."."""
    words = message.replace("/", " ").replace(":", " ").split()
    names = [word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")]
    return next((name for name in names if name in arguments), "")


def engine_config(namespace: Namespace) -> Any:
    """vLLM's configuration of the engine: it reads the model's own and checks one against the other.

    Raises:
        Refused: vLLM cannot serve this model with these arguments.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        return AsyncEngineArgs.from_cli_args(namespace).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except Exception as error:
        raise Refused(_one_line(str(error)) or type(error).__name__) from error


def _one_line(message: str) -> str:
    """pydantic puts what matters between a heading and a link."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith("For further information")]
    if len(kept) > 1 and re.match(r"\d+ validation error", kept[0]):
        kept = kept[1:]
    return " ".join(kept).split(" [type=")[0].removeprefix("Value error, ")


def require(arguments: Mapping[str, Any]) -> Namespace:
    """As `parse`, for a process that has nobody to report to but the log.

    Raises:
        ConfigError: vLLM's parser does not take them.
    """
    try:
        return parse(fitted(arguments))
    except Refused as error:
        raise ConfigError([f"engine.{error.key}: {error}" if error.key else f"[engine]: {error}"]) from error
