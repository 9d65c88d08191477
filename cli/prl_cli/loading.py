"""Reading the configuration a command was given; its warnings go to standard error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prl.config.load import LoadedConfig, load_config
from prl.config.schema import RunConfig, SftConfig
from prl_cli import output


def load(
    configs: Sequence[Path], sets: Sequence[str] | None, *, supervised: bool = False, start: bool = False
) -> LoadedConfig[Any]:
    """`start`: something is about to be started with it.

    Raises:
    ConfigError: with every problem at once.
    """
    schema: type[Any] = SftConfig if supervised else RunConfig
    loaded: LoadedConfig[Any] = load_config(configs, sets or (), schema, start=start)
    for warning in loaded.warnings:
        output.say(warning)
    return loaded
