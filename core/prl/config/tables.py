"""What every table of a configuration is: strict, frozen, and of values that messages can carry."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from prl.contribution import PluginConfig, wrong

LARGEST = 2**63 - 1
"""Messages and random generators take integers of 64 bits."""


def _check_representable(table: BaseModel) -> None:
    for key in type(table).model_fields:
        value = getattr(table, key)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise wrong(key, f"must be at most {LARGEST}, not {value}")
        if isinstance(value, str) and "\0" in value:
            raise wrong(key, "must not contain a NUL character")


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    @model_validator(mode="after")
    def _representable(self) -> Self:
        _check_representable(self)
        return self


class PluginTable(BaseModel):
    """A table whose remaining keys belong to the plugin that `use` names."""

    model_config = ConfigDict(
        extra="allow", frozen=True, validate_default=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    @model_validator(mode="after")
    def _representable(self) -> Self:
        _check_representable(self)
        return self

    kind: ClassVar[str]
    """Which plugins it takes; the group of their entry points is "prl." and this."""

    use: str
    """Name of an installed plugin, or "./file.py:Name"."""

    @property
    def own(self) -> dict[str, Any]:
        """The keys that are the plugin's, not yet validated."""
        return dict(self.__pydantic_extra__ or {})

    def plugin_config(self) -> PluginConfig:
        """The plugin's validated table.

        Raises:
            PluginError: no such plugin. ConfigError: its table is wrong.
        """
        from prl import registry

        return registry.plugin_config(self.kind, self.use, self.own)

    def build(self) -> Any:
        """Import the plugin's factory and call it with its validated table.

        Raises:
            PluginError: no such plugin, or it cannot be imported. ConfigError: its table is wrong.
        """
        from prl import registry

        return registry.build(self.kind, self.use, self.own)
