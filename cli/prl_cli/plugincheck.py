"""Checking one plugin: its declaration here, everything else (`prl.testing.contracts`) in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from prl import registry
from prl.contribution import KINDS
from prl.errors import PluginError, PluginMissing, UsageError

CHECK_TIMEOUT_S = 600


@dataclass(frozen=True)
class Step:
    name: str
    ok: bool
    detail: str = ""


@dataclass
class CheckResult:
    kind: str
    name: str
    steps: list[Step] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "ok": self.ok, "steps": [asdict(step) for step in self.steps]}


def check_plugin(name: str, kind: str | None) -> CheckResult:
    """Check a plugin grain by grain; a declaration that cannot be used ends the check.

    Raises:
        PluginMissing: there is no such plugin. UsageError: several kinds have one and none was named.
    """
    kind, name = _identify(name, kind)
    result = CheckResult(kind, name)
    try:
        contribution = registry.describe(kind, name)
    except PluginMissing:
        raise
    except PluginError as error:
        result.steps.append(Step("declaration", False, str(error)))
        return result
    result.steps.append(Step("declaration", True, contribution.summary))
    result.steps.extend(_contract(kind, name))
    return result


def _identify(name: str, kind: str | None) -> tuple[str, str]:
    """KIND/NAME, --kind, or the only kind that has a plugin of this name."""
    first, slash, rest = name.partition("/")
    if slash and first in KINDS:
        return first, rest
    if kind is not None:
        return kind, name
    if ".py:" in name:
        raise UsageError(f"say which kind {name} is, such as --kind envs; kinds are {', '.join(KINDS)}")
    having = [each for each in KINDS if name in registry.names(each)]
    if len(having) > 1:
        raise UsageError(f"{name!r} is a plugin of several kinds: {', '.join(having)}; name one with --kind")
    if not having:
        raise PluginMissing(f"no plugin is called {name!r}; `prl plugins list` shows what is installed")
    return having[0], name


def _contract(kind: str, name: str) -> list[Step]:
    """One step per contract. The process of its own is for plugins that need torch, or bring their process down."""
    command = [sys.executable, "-m", "prl.testing.contracts", kind, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [Step("contract", False, f"the checks did not end within {CHECK_TIMEOUT_S} s")]
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines or not lines[-1].startswith("["):
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        return [Step("contract", False, f"the checking process broke down: {said[-1]}")]
    return [_step(result) for result in json.loads(lines[-1])]


def _step(result: dict[str, Any]) -> Step:
    detail = f"skipped: {result['detail']}" if result["skipped"] else result["detail"]
    return Step(result["check"].replace("_", " "), result["ok"], detail)
