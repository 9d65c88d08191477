"""Contract suites: what every plugin of a kind must do, ours and yours alike.

    results = check("envs", "reverse_text")                 # what `prl plugins check` prints
    results = check("envs", "./my_env.py:MyEnv", {"length": 3})

A suite is a module with a list of plain functions. Each takes `make`, which builds a fresh plugin, returns when the
contract is kept and raises AssertionError, with what happened, when it is not; so they work as pytest tests too::

    @pytest.mark.parametrize("contract", env.CHECKS)
    def test_contract(contract):
        contract(lambda: MyEnv(MyConfig()))

* `declaration`: every kind: the light part of a plugin.
* `env`, `loss`, `algorithm`, `channel`, `trainer`, `engine`, `launcher`: one kind each. `engine` and `trainer` also
  have checks of a running server's client, which its own tests run.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl import registry
from prl.errors import ConfigError, EnvironmentNotFit, PrlError

SUITES = {
    "envs": "env",
    "losses": "loss",
    "algorithms": "algorithm",
    "channels": "channel",
    "trainers": "trainer",
    "engines": "engine",
    "launchers": "launcher",
}
"""Kinds with a suite beyond their declaration, by the name of its module."""

Make = Callable[[], Any]


class NotApplicable(Exception):
    """Raised by a check that says nothing about this plugin, with the reason."""


@dataclass(frozen=True)
class Result:
    """`ok` is also true of a check that was skipped; `detail` then says why, and otherwise what went wrong."""

    check: str
    ok: bool
    detail: str = ""
    skipped: bool = False


def check(kind: str, name: str, table: Mapping[str, Any] | None = None, *, base: Path | None = None) -> list[Result]:
    """Run every contract of `kind` on one plugin, installed or in a file, with the settings in `table`.

    Raises:
        PluginError: there is no such plugin, or its declaration cannot be used.
    """
    from prl.testing.contracts import declaration

    contribution = registry.describe(kind, name, base=base)
    results = run(declaration.CHECKS, lambda: declaration.Declared(kind, name, contribution, base))
    if kind not in SUITES:
        return results
    try:
        registry.plugin_config(kind, name, table or {}, base=base)
    except ConfigError as error:
        reason = f"needs settings that have no default, pass them: {'; '.join(error.problems)}"
        return [*results, Result("behaviour", not table, reason, skipped=not table)]

    def make() -> Any:
        return registry.build(kind, name, table, base=base)

    suite = importlib.import_module(f"prl.testing.contracts.{SUITES[kind]}")
    return [*results, *run(suite.CHECKS, make)]


def run(checks: Iterable[Callable[[Make], None]], make: Make) -> list[Result]:
    """Every check of a suite, whatever the others found."""
    return [_run_one(contract, make) for contract in checks]


def _run_one(contract: Callable[[Make], None], make: Make) -> Result:
    name = contract.__name__
    try:
        contract(make)
    except (NotApplicable, EnvironmentNotFit) as reason:
        return Result(name, True, str(reason), skipped=True)
    except AssertionError as error:
        return Result(name, False, str(error) or _where(error))
    except PrlError as error:
        return Result(name, False, f"{type(error).__name__}: {error}")
    except Exception as error:
        return Result(name, False, f"{type(error).__name__}: {error} ({_where(error)})")
    return Result(name, True)


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
