"""What an entry point of a `prl.<kind>` group points at: a light declaration.

A plugin package writes, in its `plugin.py`, which may import this module and pydantic and nothing heavy::

    class DppoConfig(PluginConfig):
        delta: float = 0.2

    DPPO = Contribution(config=DppoConfig, factory="prl_losses.dppo:build", summary="...")

and in its pyproject.toml::

    [project.entry-points."prl.losses"]
    dppo = "prl_losses.plugin:DPPO"

The config validates a TOML on a machine without torch; the factory is imported only in the process that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

API_VERSION = 1
"""The plugin interface of this core. A contribution built for another one is listed and refused where used."""

KINDS = (
    "models",
    "envs",
    "losses",
    "algorithms",
    "engines",
    "trainers",
    "channels",
    "launchers",
    "monitors",
    "commands",
)


class PluginConfig(BaseModel):
    """Base of every plugin's own table: strict, frozen, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )


def wrong(key: str, message: str) -> PydanticCustomError:
    """An error for a validator to raise when it knows which key of its table, "a.0.b", should be changed."""
    return PydanticCustomError("prl", "{message}", {"key": key, "message": message})


class NoConfig(PluginConfig):
    """The table of a plugin that takes no settings."""


@dataclass(frozen=True)
class Contribution:
    """A plugin's declaration.

    Args:
        factory: "package.module:attribute", called with the validated config; what it returns is
            the protocol of its kind, in `prl.protocols`, `prl.loss` or, for models, `prl_models.provider`.
        config: schema of the plugin's own table.
        summary: one line for `prl plugins`.
        api_version: the `API_VERSION` it was written for.
    """

    factory: str
    config: type[PluginConfig] = NoConfig
    summary: str = ""
    api_version: int = API_VERSION

    def load_factory(self) -> Any:
        """Import the factory: the heavy grain, only in the process that needs it."""
        import importlib

        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)
