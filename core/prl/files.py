"""Plugins that are a name in a file: "./my_env.py:MyEnv" instead of an installed package.

The name may be a `Contribution`; or any class or function, which is then the factory. Its settings are its parameters::

    class MyEnv:
        def __init__(self, length: int = 5): ...        # length = 7 in its table, checked as an int

A class with an inner `Config(PluginConfig)` is called with an instance of that instead, and one whose only parameter is
called `config` with the table as a dict. The file is imported where its declaration is needed, so checking a
configuration runs it: a file that imports torch at its top makes `prl config check` import torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, create_model

from prl.contribution import Contribution, NoConfig, PluginConfig
from prl.errors import PluginBroken, PluginMissing

_REFERENCE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


class AnyTable(PluginConfig):
    """The table of a factory that takes a dict, or any keyword."""

    model_config = ConfigDict(extra="allow")


class KeywordTable(PluginConfig):
    """Base of a table made of a signature: a default may contradict its annotation (`x: int = None`)."""

    model_config = ConfigDict(arbitrary_types_allowed=True, validate_default=False)


@dataclass(frozen=True)
class FileContribution(Contribution):
    """The declaration of a name in a file. `target` is what is called, `how` with what."""

    target: Callable[..., Any] = field(kw_only=True)
    how: typing.Literal["config", "dict", "keywords"] = field(kw_only=True)

    def load_factory(self) -> Callable[[PluginConfig], Any]:
        return self._call

    def _call(self, config: PluginConfig) -> Any:
        if self.how == "config":
            return self.target(config)
        given = {key: getattr(config, key) for key in config.model_fields_set}
        if self.how == "dict":
            return self.target(given)
        return self.target(**given)


def is_reference(name: str) -> bool:
    """Whether a plugin's name is a name in a file."""
    return _REFERENCE.fullmatch(name) is not None


def attribute(reference: str) -> str:
    """ "MyEnv" of "./my_env.py:MyEnv"."""
    match = _REFERENCE.fullmatch(reference)
    return match["name"] if match else reference


def absolute(reference: str, base: Path | None = None) -> str:
    """The same reference with an absolute path, so that a process with another working directory finds it."""
    path, name = _split(reference, base)
    return f"{path}:{name}"


def load(kind: str, reference: str, base: Path | None = None) -> Contribution:
    """Import the file and make a declaration of the name.

    Raises:
        PluginMissing: no such file, or no such name in it. PluginBroken: it cannot be imported.
    """
    found = named(reference, base)
    if isinstance(found, Contribution):
        return found
    path, name = _split(reference, base)
    return _declare(found, f"{_module_name(path)}:{name}", reference)


def named(reference: str, base: Path | None = None) -> Any:
    """What the name in the file stands for: something that can be called, or a Contribution.

    Raises:
        PluginMissing: no such file, or no such name in it. PluginBroken: it cannot be imported.
    """
    path, name = _split(reference, base)
    if not path.is_file():
        raise PluginMissing(f"{reference}: there is no file {path}")
    module = _import(path, reference)
    if not hasattr(module, name):
        raise PluginMissing(f"{reference}: {path.name} defines no {name}; it defines {_defined_in(module)}")
    found = getattr(module, name)
    if not callable(found) and not isinstance(found, Contribution):
        raise PluginBroken(
            f"{reference}: {name} is a {type(found).__name__}; a class, a function or a Contribution is needed"
        )
    return found


def _defined_in(module: Any) -> str:
    """What a file itself defines that could be meant; what it imports is left out."""
    own = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and (isinstance(value, Contribution) or getattr(value, "__module__", None) == module.__name__)
    ]
    return ", ".join(sorted(own)) or "nothing"


def _split(reference: str, base: Path | None) -> tuple[Path, str]:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise PluginMissing(f"{reference!r} is not of the form ./file.py:Name")
    path = Path(match["path"]).expanduser()
    return ((base or Path.cwd()) / path).resolve(), match["name"]


def _import(path: Path, reference: str) -> Any:
    """Import once per process. The file's folder goes to the end of sys.path: it may import its neighbours."""
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginBroken(f"{reference}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginBroken(f"{reference} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _module_name(path: Path) -> str:
    return f"prl_file_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _declare(target: Callable[..., Any], factory: str, reference: str) -> FileContribution:
    summary = inspect.cleandoc(target.__doc__ or "").partition("\n")[0]  # a class does not inherit `__doc__`
    inner = getattr(target, "Config", None)
    if isinstance(inner, type) and issubclass(inner, PluginConfig):
        return FileContribution(factory, inner, summary, target=target, how="config")
    parameters = list(inspect.signature(target).parameters.values())
    if [parameter.name for parameter in parameters] == ["config"]:
        wanted = _annotations(target).get("config")
        if isinstance(wanted, type) and issubclass(wanted, PluginConfig):
            return FileContribution(factory, wanted, summary, target=target, how="config")
        return FileContribution(factory, AnyTable, summary, target=target, how="dict")
    if not parameters:
        return FileContribution(factory, NoConfig, summary, target=target, how="keywords")
    return FileContribution(factory, _schema(target, parameters, reference), summary, target=target, how="keywords")


def _schema(target: Callable[..., Any], parameters: list[inspect.Parameter], reference: str) -> type[PluginConfig]:
    """A table whose keys are the parameters of a function or class."""
    annotations = _annotations(target)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            return AnyTable
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise PluginBroken(f"{reference}: the parameter {parameter.name!r} has no keyword, so no key can set it")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (annotations.get(parameter.name, Any), default)
    try:
        return create_model(attribute(reference), __base__=KeywordTable, **fields)
    except Exception as error:
        raise PluginBroken(f"{reference}: its parameters cannot be keys of a table: {error}") from error


def _annotations(target: Callable[..., Any]) -> dict[str, Any]:
    """Resolved annotations; those that cannot be resolved (under TYPE_CHECKING) accept anything."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        return typing.get_type_hints(function)
    except Exception:
        return {}
