"""Asking vLLM, in a process under its own interpreter, whether it would start: before anything else does.

That takes as long as importing vLLM, 10 to 30 s. What it did not object to is remembered by everything that it depends
on: the arguments, the model's config.json, the interpreter and its vLLM.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from prl import foreign
from prl.errors import EnvironmentNotFit
from prl_engine_vllm import interpreter
from prl_engine_vllm.arguments import complete
from prl_engine_vllm.check import Report
from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.engine import distributions
from prl_engine_vllm.lastwords import last_words

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

TIMEOUT_S = 600.0


def problems(config: RunConfig, own: VllmConfig) -> Iterator[tuple[str, str]]:
    """(dotted key, message) of everything that vLLM would not start with.

    Raises:
        ConfigError: the adapters that are trained are larger than vLLM takes. EnvironmentNotFit: there is no vLLM, or
            it cannot be asked.
    """
    found = asked(config, own)
    yield from found.problems
    length = found.max_model_len
    if length and config.sampling.max_tokens >= length:
        yield (
            "sampling.max_tokens",
            f"is {config.sampling.max_tokens}, but prompt and answer together may have {length} tokens "
            "(engine.max_model_len, or what the model allows)",
        )


def asked(config: RunConfig, own: VllmConfig) -> Report:
    """vLLM's answer, or the remembered one."""
    python, version = interpreter.require(own)
    kept = interpreter.cache() / "vllm-checks" / f"{_digest(config, own, python, version)}.json"
    try:
        return msgspec.json.decode(kept.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError):
        pass
    print(f"asking vLLM {version} whether it can serve {config.model.path} so ...", file=sys.stderr, flush=True)
    found = _ask(config, python)
    if not found.problems:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(msgspec.json.encode(found))
    return found


def _digest(config: RunConfig, own: VllmConfig, python: str, version: str) -> str:
    """Of all that vLLM's answer depends on; `complete` has the keys of other tables that become arguments.

    Raises:
        ConfigError: there are no such arguments.
    """
    asked_for = [complete(config, own), own.env, config.model.model_dump(mode="json")]
    content = msgspec.json.encode([version, python, asked_for, _model(config)])
    return hashlib.sha256(content).hexdigest()


def _model(config: RunConfig) -> str:
    try:
        return (Path(config.model.path).expanduser() / "config.json").read_text()
    except OSError:
        return ""


def _ask(config: RunConfig, python: str) -> Report:
    with tempfile.TemporaryDirectory(prefix="prl-vllm-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        links = f"{folder}/packages"
        argv = foreign.command(python, distributions(config), links, "-m", "prl_engine_vllm.check", str(result))
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    argv,
                    input=config.model_dump_json().encode(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise EnvironmentNotFit(f"vLLM under {python} gave no answer in {TIMEOUT_S:g} s") from error
        if done.returncode or not result.exists():
            said = last_words(log) or log.read_text(errors="replace")[-500:].strip() or f"exit code {done.returncode}"
            raise EnvironmentNotFit(f"vLLM under {python} cannot be asked whether it would start: {said}")
        return msgspec.json.decode(result.read_bytes(), type=Report)
