"""Running a role of ours under another interpreter, which has what this one lacks and nothing of prl.

Code that needs vLLM, or an environment's own libraries, runs where those are installed. Our packages come along as a
folder of links to exactly the ones that are needed, first on its PYTHONPATH: that installation stays as it is and holds
no checkout, and nothing else of this one is seen there. What our packages import must be there; `probe` asks.

A plan has `command(...)`: a process under this interpreter makes the links and becomes one of the other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prl.errors import EnvironmentNotFit

PROBE_TIMEOUT_S = 60.0

_OURS_ALONE = {"PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
"""Variables that another interpreter must not inherit."""

_PROBE = """
import importlib.metadata, importlib.util, json, sys
distributions = {name: None for name in sys.argv[1].split(",") if name}
for name in distributions:
    try:
        distributions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
modules = [name for name in sys.argv[2].split(",") if name and importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), distributions, modules]))
"""


class Found(msgspec.Struct, frozen=True):
    """What an interpreter has. `versions` of the distributions asked for, None for one that is not installed."""

    python: tuple[int, int]
    versions: dict[str, str | None]
    missing: list[str]
    """Modules asked for that cannot be imported."""


def probe(python: str | Path, distributions: Sequence[str], modules: Sequence[str] = ()) -> Found:
    """Ask an interpreter what is installed there, or is on the PYTHONPATH that it would have. It imports nothing of
    that: about 0.1 s.

    Raises:
        EnvironmentNotFit: it cannot be run.
    """
    argv = [os.path.abspath(python), "-c", _PROBE, ",".join(distributions), ",".join(modules)]
    seen = {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}
    try:  # from "/", where no file can be taken for a module
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True, env=seen, cwd="/"
        )
        version, versions, missing = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvironmentNotFit(f"{python} cannot be run as a Python interpreter: {error}") from error
    return Found((version[0], version[1]), versions, missing)


def command(python: str | Path, distributions: Sequence[str], links: str, *arguments: str) -> tuple[str, ...]:
    """argv of a process under `python` that sees these distributions of this installation.

    Args:
        links: the folder for the links; it may contain "{run_dir}".
        arguments: of that interpreter, such as "-m", "package".
    """
    if _same(python):
        return (sys.executable, *arguments)
    return (sys.executable, "-m", "prl.foreign", links, str(python), ",".join(distributions), *arguments)


def link(folder: Path, distributions: Sequence[str]) -> None:
    """Fill `folder` with links to the packages and the metadata of these distributions. Several may do so at once.

    Raises:
        EnvironmentNotFit: one of them is not installed here, or not as files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in distributions:
        for target in _parts(name):
            temporary = folder / f".{target.name}.{os.getpid()}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            temporary.replace(folder / target.name)


def variables(folder: Path) -> dict[str, str]:
    """This process's environment, with the links first on PYTHONPATH."""
    former = os.environ.get("PYTHONPATH")
    found = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{former}" if former else str(folder)}
    return {name: value for name, value in found.items() if name not in _OURS_ALONE}


def _same(python: str | Path) -> bool:
    """Not by the resolved path: the interpreters of two virtual environments are links to one file."""
    return os.path.abspath(python) == os.path.abspath(sys.executable)


def _parts(name: str) -> list[Path]:
    """The folders of a distribution: its packages and its metadata."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentNotFit(f"{name} is not installed under {sys.executable}: run `make setup`") from None
    files = distribution.files or []
    metadata = next((file for file in files if file.name == "METADATA"), None)
    if metadata is None:
        raise EnvironmentNotFit(f"{name} has no metadata under {sys.executable}: install it again")
    packages = {file.parts[0] for file in files if len(file.parts) > 1 and file.name.endswith(".py")}
    # An editable installation lists no packages; its entry points name them.
    packages |= {point.module.partition(".")[0] for point in distribution.entry_points}
    packages |= {"prl"} if name == "prl-core" else set()
    found = [Path(str(distribution.locate_file(metadata))).parent.resolve()]
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            found.append(Path(next(iter(spec.submodule_search_locations))).resolve())
    return found


def main(argv: Sequence[str]) -> None:
    """`python -m prl.foreign FOLDER PYTHON DISTRIBUTION,... ARGUMENT...`"""
    folder, python, names, *arguments = argv
    link(Path(folder), names.split(","))
    os.execve(python, [python, *arguments], variables(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
