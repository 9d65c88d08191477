"""`python -m prl_engine_vllm.check RESULT < config.json`, under the interpreter that has vLLM: whether it would start.

vLLM's own parser reads the arguments, and vLLM puts the configuration of an engine together: it reads the model's, and
checks one against the other. No weight is read and no process started. RESULT gets a `Report` as JSON.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from prl import registry
from prl.config.schema import RunConfig
from prl_engine_vllm import settings
from prl_engine_vllm.arguments import Refused, complete, engine_config, fitted, parse
from prl_engine_vllm.config import VllmConfig

_OF_THE_MODEL = re.compile(
    r"architecture|model type|model_type|config\.json|tokenizer|repo id|safetensors", re.IGNORECASE
)


class Report(msgspec.Struct):
    """`problems` are (dotted key, message). The rest is what the engine would be."""

    problems: list[tuple[str, str]] = []
    max_model_len: int = 0


def report(config: RunConfig) -> Report:
    """What vLLM says of a run's engine."""
    own = cast(VllmConfig, config.engine.plugin_config())
    settings.apply(own)
    try:
        namespace = parse(fitted(complete(config, own)))
    except Refused as error:
        return Report([(f"engine.{error.key}" if error.key else "engine", str(error))])
    try:
        built = engine_config(namespace)
    except Refused as error:
        return Report([(blamed(str(error), own.arguments), f"vLLM refuses it: {error}")])
    return Report(max_model_len=built.model_config.max_model_len)


def blamed(message: str, given: Mapping[str, Any]) -> str:
    """The key that a message of vLLM is about."""
    words = set(re.findall(r"[a-z0-9]\w*", message.replace("-", "_")))  # "--some-key" too
    named = [key for key in given if key in words]
    if named:
        return f"engine.{max(named, key=len)}"
    return "model.path" if _OF_THE_MODEL.search(message) else "engine"


def main() -> None:
    config = registry.validate_strictly(RunConfig, msgspec.json.decode(sys.stdin.buffer.read()))
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(report(config)))


if __name__ == "__main__":
    main()
