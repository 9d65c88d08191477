"""Rules for the text of the code: no dangerous calls, sizes within the budget, ASCII, public names."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Distribution

MODULE_LINES = 400
FUNCTION_LINES = 60
"""Without its docstring."""

TOO_LONG: dict[str, int] = {}
"""Modules ("core/prl/x.py") and functions ("core/prl/x.py:name") above the budget, with the size they must not exceed.
The list may only shrink: an entry whose size has fallen by SLACK has to be lowered, or removed."""
SLACK = 20

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "os.system",
    "os.popen",
    "numpy.load",
    "np.load",
    "yaml.load",
    "__import__",
}


def test_no_dangerous_call_or_module(distributions: list[Distribution], root: Path) -> None:
    problems = []
    for path in sources(distributions, root):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                problems += [
                    f"{where(path, node, root)}: imports {name}" for name in named if name in FORBIDDEN_MODULES
                ]
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                unsafe = any(
                    keyword.arg == "shell" and ast.unparse(keyword.value) != "False" for keyword in node.keywords
                )
                if name in FORBIDDEN_CALLS or unsafe:
                    problems.append(f"{where(path, node, root)}: calls {name}")
    assert not problems, "\n".join(problems)


def test_the_check_for_dangerous_calls_can_fail() -> None:
    tree = ast.parse("torch.load(x)")
    assert ast.unparse(next(node for node in ast.walk(tree) if isinstance(node, ast.Call)).func) in FORBIDDEN_CALLS


def test_modules_and_functions_are_within_the_budget(distributions: list[Distribution], root: Path) -> None:
    sizes: dict[str, int] = {}
    limits: dict[str, int] = {}
    for path in sources(distributions, root):
        name = str(path.relative_to(root))
        text = path.read_text()
        sizes[name], limits[name] = len(text.splitlines()), MODULE_LINES
        for qualified, length in functions(ast.parse(text)):
            sizes[f"{name}:{qualified}"], limits[f"{name}:{qualified}"] = length, FUNCTION_LINES
    long = {name: size for name, size in sizes.items() if size > limits[name]}
    grown = [
        f"{name} has {size} lines, at most {TOO_LONG.get(name, limits[name])}"
        for name, size in long.items()
        if size > TOO_LONG.get(name, limits[name])
    ]
    assert not grown, "\n".join(grown)
    stale = [
        f"{name}: {allowed} is allowed, it has {sizes.get(name, 0)}"
        for name, allowed in TOO_LONG.items()
        if name not in long or long[name] <= allowed - SLACK
    ]
    assert not stale, "lower or remove: " + "; ".join(stale)


def test_code_is_ascii(distributions: list[Distribution], root: Path) -> None:
    problems = [
        f"{path.relative_to(root)}:{number}"
        for path in sources(distributions, root)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not line.isascii()
    ]
    assert not problems, f"write \\u escapes: {problems}"


def test_every_module_says_what_it_is(distributions: list[Distribution], root: Path) -> None:
    problems = [
        str(path.relative_to(root))
        for path in sources(distributions, root)
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not problems, f"without a docstring: {problems}"


def test_the_map_of_a_package_names_its_modules(distributions: list[Distribution], root: Path) -> None:
    """The docstring of a package of four or more modules is its map. For the root of the core, core/README.md is."""
    missing = []
    for path in sources(distributions, root):
        if path.name != "__init__.py" or path.parent.name == "commands":
            continue
        modules = [other.stem for other in path.parent.glob("*.py") if not other.stem.startswith("__")]
        if len(modules) < 4:
            continue
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path == root / "core/prl/__init__.py":
            said = (root / "core/README.md").read_text()
        missing += [
            f"{path.parent.relative_to(root)}: {name}" for name in modules if not re.search(rf"\b{name}\b", said)
        ]
    assert not missing, "\n".join(sorted(missing))


def test_public_names_are_sorted_complete_and_documented() -> None:
    prl = importlib.import_module("prl")
    assert list(prl.__all__) == sorted(prl.__all__)
    assert set(prl.__all__) == set(prl._HOMES)
    for name in prl.__all__:
        found = getattr(prl, name)
        assert found.__module__ == prl._HOMES[name], name
        assert found.__doc__, name


def sources(distributions: list[Distribution], root: Path) -> Iterator[Path]:
    for dist in distributions:
        yield from dist.sources()
    for folder in ("examples", "benchmarks"):
        yield from sorted((root / folder).rglob("*.py"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and lines of every function, without signature (a Triton kernel's has 40 lines) and docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and ast.get_docstring(node) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield f"{prefix}{node.name}", (node.end_lineno or 0) - first.lineno + 1 - docstring
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def where(path: Path, node: ast.AST, root: Path) -> str:
    return f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
