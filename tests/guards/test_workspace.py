"""The lists that repeat the folders on disk agree with them, and every distribution has the same shape."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conftest import Distribution

TAKEN = {"prl", "prl-cli"}
"""Names on the package index that belong to others: depending on one would install a stranger's package."""

PART_OF = {"pydantic_core": "pydantic"}
"""Packages that come with exactly one version of another."""

PEERS = {"trl", "datasets", "flash_attn", "vllm"}
"""Measured against where they are installed."""

BROUGHT = {"prl-engine-vllm": {"vllm", "torch", "safetensors", "uvicorn"}}
"""What the other interpreter has, under which the process of a distribution runs."""

OPTIONAL = {"pytest", "uvloop", "flash_attn", "liger_kernel", "quack", "renderers"}
"""Used where they are present, or by code for tests; nothing requires them."""


def test_every_distribution_is_in_every_list(
    distributions: list[Distribution], workspace: dict[str, Any], root: Path
) -> None:
    folders = {dist.folder for dist in distributions}
    names = {dist.name for dist in distributions}
    requirements = set(re.findall(r"^-e \./(\S+)$", (root / "requirements.txt").read_text(), re.MULTILINE))
    assert requirements == folders
    uv = workspace["tool"]["uv"]
    assert set(uv["workspace"]["members"]) == folders
    assert set(uv["sources"]) == names
    assert set(workspace["project"]["dependencies"]) == names, "`uv sync` removes members that are not listed"
    assert set(workspace["tool"]["importlinter"]["root_packages"]) == {dist.package for dist in distributions}
    assert set(workspace["tool"]["mypy"]["mypy_path"].split(":")) == folders


def test_import_contracts_name_every_plugin(distributions: list[Distribution], workspace: dict[str, Any]) -> None:
    plugins = {dist.package for dist in distributions} - {"prl", "prl_cli"}
    contracts = {contract["id"]: contract for contract in workspace["tool"]["importlinter"]["contracts"]}
    assert set(contracts["plugins"]["modules"]) == plugins
    assert set(contracts["plugins-cli"]["source_modules"]) == plugins
    declarations = {
        f"{dist.package}.{name}"
        for dist in distributions
        for name in ("plugin", "config")
        if dist.package in plugins and (dist.path / dist.package / f"{name}.py").exists()
    }
    assert set(contracts["declarations"]["source_modules"]) == declarations
    assert plugins <= set(contracts["core"]["forbidden_modules"])
    assert plugins <= set(contracts["cli"]["forbidden_modules"])


def test_torch_stands_first_in_requirements_and_is_the_same_for_uv(root: Path, workspace: dict[str, Any]) -> None:
    lines = [line for line in (root / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert re.fullmatch(r"torch==[\d.]+", lines[0]), "otherwise pip may take another build of torch"
    assert workspace["tool"]["uv"]["constraint-dependencies"] == [lines[0]]


def test_every_distribution_has_the_same_shape(distributions: list[Distribution]) -> None:
    for dist in distributions:
        project = dist.project
        assert project["name"].startswith("prl-"), dist.folder
        assert project["license"] == "Apache-2.0", dist.folder
        assert project["requires-python"] == ">=3.11", dist.folder
        assert project["version"] == distributions[0].project["version"], dist.folder
        assert project["description"], dist.folder
        assert (dist.path / project["readme"]).is_file(), dist.folder
        assert (dist.path / dist.package / "py.typed").is_file() or dist.package == "prl_cli", (
            f"{dist.folder}: py.typed"
        )


def test_nobody_depends_on_a_strangers_package(distributions: list[Distribution]) -> None:
    for dist in distributions:
        extras = [line for lines in dist.project.get("optional-dependencies", {}).values() for line in lines]
        required = {_distribution_name(line) for line in [*dist.project.get("dependencies", []), *extras]}
        assert dist.name not in TAKEN and not required & TAKEN, dist.folder
        assert dist.name == "prl-core" or "prl-core" in required, f"{dist.folder} needs prl-core"


def test_every_import_is_declared(distributions: list[Distribution]) -> None:
    """Installed alone, a distribution must find what it imports. A dependency's dependency does not count, except
    what prl-core brings."""
    providers = importlib.metadata.packages_distributions()
    providers |= {dist.package: [dist.name] for dist in distributions}  # editable installs list no packages
    by_name = {dist.name: dist for dist in distributions}
    problems = []
    for dist in distributions:
        declared = _declared(dist) | _declared(by_name["prl-core"])
        for path in dist.sources():
            allowed = BROUGHT.get(dist.name, set())
            if path.parts[-3:] == ("prl", "testing", "numerics.py"):
                allowed = {"torch"}
            for module in _imported(path) - allowed:
                owners = {_distribution_name(owner) for owner in providers.get(PART_OF.get(module, module), [])}
                if module in sys.stdlib_module_names or module in OPTIONAL or module == dist.package:
                    continue
                if not owners & declared:
                    problems.append(f"{path.relative_to(dist.path)}: {module} is not a dependency of {dist.name}")
    assert not problems, "\n".join(problems)


def test_every_dependency_is_imported(distributions: list[Distribution]) -> None:
    """Of one that is not, nobody would notice when it broke an installation."""
    providers = importlib.metadata.packages_distributions()
    providers |= {dist.package: [dist.name] for dist in distributions}
    problems = []
    for dist in distributions:
        used = {
            _distribution_name(owner)
            for path in dist.sources()
            for module in _imported(path)
            for owner in providers.get(PART_OF.get(module, module), [])
        }
        required = {_distribution_name(line) for line in dist.project.get("dependencies", [])}
        problems += [f"{dist.name}: {name}" for name in sorted(required - used)]
    assert not problems, "\n".join(problems)


def test_tools_and_what_tests_import_are_declared(
    distributions: list[Distribution], workspace: dict[str, Any], root: Path
) -> None:
    tools = set(workspace["dependency-groups"]["dev"])
    required = (root / "requirements.txt").read_text()
    assert set(required.partition("# development\n")[2].split()) == tools, "pip's door and uv's differ"
    providers = importlib.metadata.packages_distributions() | {dist.package: [dist.name] for dist in distributions}
    declared = {_distribution_name(line) for line in tools}.union(*map(_declared, distributions))
    local = {
        path.stem
        for path in [*root.glob("tests/**/*.py"), *root.glob("benchmarks/**/*.py"), *root.glob("examples/**/*.py")]
    }
    local |= {"tests", "benchmarks", "acme_arithmetic", "acme_reinforce", *sys.stdlib_module_names}
    problems = []
    for path in [*root.glob("tests/**/*.py"), *root.glob("examples/**/*.py"), *root.glob("benchmarks/**/*.py")]:
        for module in _imported(path) - local:
            owners = {_distribution_name(owner) for owner in providers.get(PART_OF.get(module, module), [])}
            if not owners & declared and module not in PEERS:
                problems.append(f"{path.relative_to(root)}: {module}")
    assert not problems, problems


def test_entry_points_are_light_declarations(distributions: list[Distribution]) -> None:
    from prl.contribution import KINDS

    seen: set[tuple[str, str]] = set()
    for dist in distributions:
        for group, points in dist.entry_points.items():
            assert group in {f"prl.{kind}" for kind in KINDS} | {"prl.hooks"}, f"{dist.folder}: {group}"
            for name, value in points.items():
                assert re.fullmatch(r"[a-z][a-z0-9_]*", name), f"{dist.folder}: {name}"
                assert (group, name) not in seen, f"{name} is declared twice"
                seen.add((group, name))
                module, _, attribute = value.partition(":")
                assert module == f"{dist.package}.plugin", f"{dist.folder}: {value}"
                assert attribute == attribute.upper(), f"{dist.folder}: {value} is a constant"


def test_metadata_of_this_environment_is_that_of_the_sources(distributions: list[Distribution]) -> None:
    """An entry point added to a pyproject.toml is only seen after `make setup`."""
    for dist in distributions:
        installed = importlib.metadata.distribution(dist.name)
        points = {
            (point.group, point.name, point.value) for point in installed.entry_points if point.group.startswith("prl.")
        }
        declared = {(group, name, value) for group, named in dist.entry_points.items() for name, value in named.items()}
        assert points == declared, f"{dist.name}: run `make setup`"


def _distribution_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _declared(dist: Distribution) -> set[str]:
    extras = [line for lines in dist.project.get("optional-dependencies", {}).values() for line in lines]
    return {_distribution_name(line) for line in [dist.name, *dist.project.get("dependencies", []), *extras]}


def _imported(path: Path) -> set[str]:
    """Top-level names of every import of a file, deferred ones too, those for type checkers not."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
