"""Checking one installed plugin: its metadata, its declaration, its implementation, its contract tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from prl import registry
from prl.contribution import KINDS
from prl.errors import PluginError, PluginMissing, UsageError


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
    """Check a plugin grain by grain; a grain that fails ends the check.

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
    undocumented = [key for key, info in contribution.config.model_fields.items() if not info.description]
    result.steps.append(
        Step(
            "every key is documented",
            not undocumented,
            f"no docstring: {', '.join(undocumented)}" if undocumented else "",
        )
    )
    result.steps.append(_in_process("implementation", kind, name))
    if result.ok and importlib.util.find_spec("pytest") is not None:
        result.steps.append(_contract(kind, name))
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


def _in_process(label: str, kind: str, name: str) -> Step:
    """Import the implementation in a process of its own: it may need torch, and it may bring the process down."""
    code = (
        "import sys; from prl import registry; registry.describe(sys.argv[1], sys.argv[2]).load_factory(); print('ok')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, kind, name], capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return Step(
        label, done.returncode == 0, "" if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1]
    )


def _contract(kind: str, name: str) -> Step:
    """The contract suite that prl.testing ships for the kind, if it ships one."""
    module = f"prl.testing.contracts.{kind}"
    try:
        if importlib.util.find_spec(module) is None:
            return Step("contract tests", True, f"there are none for {kind}")
    except ModuleNotFoundError:
        return Step("contract tests", True, f"there are none for {kind}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "--pyargs", module]
    done = subprocess.run([*command, f"--prl-plugin={name}"], capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return Step("contract tests", done.returncode == 0, lines[-1] if lines else done.stderr.strip()[-200:])
