"""Installing plugin packages into the environment that runs prl, without harming it.

Which tool: pip of this environment, or uv where it has none (`uv venv` makes none). An environment that belongs to
another tool, which would forget the plugin at its next upgrade, is refused with the command that lasts. Nothing that
prl itself runs on may be exchanged: the versions of torch, transformers and prl's own packages are constraints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prl.errors import EnvironmentNotFit, PrlError, UsageError

PROTECTED = ("torch", "transformers", "vllm")
"""Besides prl's own packages. A plugin that needs another version of one belongs into an environment of its own."""

LIST = (
    "import json; from prl import registry; from prl.contribution import KINDS; "
    "print(json.dumps([[k, n, e.distribution] for k in KINDS for n, e in registry.names(k).items()]))"
)


class InstallFailed(PrlError):
    """The installer refused. What it said stands on standard error."""


def install(packages: Sequence[str], *, upgrade: bool = False, dry_run: bool = False) -> list[tuple[str, str, str]]:
    """Install packages, and return the plugins that came: (kind, name, package).

    Raises:
        UsageError: this environment belongs to another tool. EnvironmentNotFit: there is no installer.
        InstallFailed: the installer refused.
    """
    refuse_foreign_environment(packages)
    before = set(_plugins())
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in protected().items()))
        options = [
            "--constraint",
            str(constraints),
            *(["--upgrade"] if upgrade else []),
            *(["--dry-run"] if dry_run else []),
        ]
        _run([*installer("install"), *options, *packages])
    return [plugin for plugin in _plugins() if plugin not in before]


def uninstall(packages: Sequence[str]) -> list[tuple[str, str, str]]:
    """Remove packages that provide plugins, and return the plugins that went.

    Raises:
        UsageError: a package provides no plugin, or is prl's own core. Otherwise as `install`.
    """
    refuse_foreign_environment(packages)
    before = _plugins()
    providers = {_normal(package) for _, _, package in before}
    for package in packages:
        if _normal(package) not in providers:
            known = ", ".join(sorted(providers)) or "none"
            raise UsageError(f"{package} provides no plugin; packages that do: {known}")
    tool = installer("uninstall")
    _run([*tool, *(["--yes"] if "-m" in tool else []), *packages])
    after = set(_plugins())
    return [plugin for plugin in before if plugin not in after]


def installer(action: str) -> list[str]:
    """The command line that installs into, or removes from, this interpreter's environment.

    Raises:
        EnvironmentNotFit: neither pip nor uv can be found.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check", action]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", action, "--python", sys.executable]
    raise EnvironmentNotFit(
        f"neither pip nor uv can be found for {sys.executable}: run `{sys.executable} -m ensurepip`, or install uv"
    )


def refuse_foreign_environment(packages: Sequence[str], prefix: Path | None = None) -> None:
    """Raises:
    UsageError: a tool manages this environment and would drop what was installed behind its back.
    """
    prefix = prefix or Path(sys.prefix)
    names = " ".join(packages)
    if (prefix / "uv-receipt.toml").exists():
        extra = " ".join(f"--with {package}" for package in packages)
        raise UsageError(
            f"prl was installed by `uv tool`, whose next upgrade would drop plugins installed here. Use: "
            f"uv tool install prl-console {extra} (and --with for every plugin you already have)"
        )
    if (prefix / "pipx_metadata.json").exists():
        raise UsageError(f"prl was installed by pipx. Use: pipx inject prl-console {names}")
    if prefix == Path(sys.base_prefix) and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
        raise UsageError(
            "this Python belongs to the operating system. Make an environment for prl: "
            f"python3 -m venv .venv && .venv/bin/pip install prl-console {names}"
        )


def protected() -> dict[str, str]:
    """What must keep its version: name to version."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = _normal(distribution.name)
        if name in PROTECTED or name.startswith("prl-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _plugins() -> list[tuple[str, str, str]]:
    """As a fresh interpreter sees them: this one has read the metadata already."""
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise InstallFailed(f"the installed plugins cannot be listed any more: {done.stderr.strip()[-500:]}")
    return [(kind, name, package) for kind, name, package in json.loads(done.stdout)]


def _run(command: Sequence[str]) -> None:
    """Run an installer; all that it says goes to standard error."""
    done = subprocess.run(command, stdout=2, stderr=2)
    if done.returncode != 0:
        raise InstallFailed(
            f"`{' '.join(command[:4])} ...` failed with exit code {done.returncode}. If it could not keep "
            f"{', '.join(PROTECTED)} or a package of prl at its version, the plugin needs an environment of its own"
        )


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
