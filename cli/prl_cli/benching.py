"""`prl bench trainer`: from a configuration to the process of the trainer plugin that measures."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prl import registry
from prl.config.bench import BenchConfig
from prl.config.compose import Composition
from prl.config.load import load_config
from prl.config.problems import translate
from prl.config.schema import RunConfig, SftConfig
from prl.errors import ConfigError, UsageError
from prl_cli import output


def trainer(
    configs: Sequence[Path],
    sets: Sequence[str] | None,
    given: Mapping[str, Any],
    profile: Path | None,
    out: Path | None,
) -> int:
    """Measure; returns the exit code of the process that does.

    Args:
        given: keys of [bench] that override the configuration's.

    Raises:
        ConfigError: with every problem. UsageError: the trainer plugin has no benchmark, or a file cannot be written.
    """
    for file in (profile, out):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{file} cannot be written: there is no folder {file.absolute().parent}")
    config = read(configs, sets or (), given)
    plugin = config.trainer.build()
    if not hasattr(plugin, "bench"):
        raise UsageError(f"the trainer {config.trainer.use!r} has no benchmark")
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as folder:
        request = Path(folder) / "request.json"
        request.write_text(config.model_dump_json())
        command = [*plugin.bench(config, request), *([str(profile.absolute())] if profile is not None else [])]
        code = subprocess.run(command, check=False).returncode
        if code == 0 and out is not None:
            shutil.copyfile(request.with_name("rows.json"), out)
            output.say(f"the result is in {out}")
    return 1 if code < 0 else code


def read(configs: Sequence[Path], sets: Sequence[str], given: Mapping[str, Any]) -> BenchConfig:
    """Raises: ConfigError: with every problem at once."""
    kind = run_kind(configs, sets)
    if kind is None:
        options = [f"bench.{key}={json.dumps(value)}" for key, value in given.items()]
        return load_config(configs, [*sets, *options], BenchConfig, checks=False).config
    run: Any = load_config(configs, sets, kind, checks=False).config
    values = {name: getattr(run, name).model_dump() for name in ("model", "loss", "trainer")}
    try:
        return registry.validate_strictly(BenchConfig, {"seed": run.seed, **values, "bench": given})
    except ValidationError as error:
        raise ConfigError([str(problem) for problem in translate(error, BenchConfig)]) from error


def run_kind(configs: Sequence[Path], sets: Sequence[str]) -> type[RunConfig] | type[SftConfig] | None:
    """Of which command the configuration is; None for one that was made for `prl bench`."""
    data = Composition(configs, sets).data
    if "envs" in data:
        return RunConfig
    return SftConfig if "data" in data else None


def lengths(text: str) -> list[int]:
    """Raises: UsageError: not numbers with commas between them."""
    try:
        return [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--documents {text!r}: expected lengths such as 16384 or 6000,200,3000") from None
