"""The contract of every declaration: light, documented, and pointing at something that exists."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prl import files
from prl.contribution import Contribution, PluginConfig
from prl.testing.contracts import NotApplicable

HEAVY = ("torch", "transformers", "vllm", "tokenizers", "safetensors", "pyarrow", "numpy", "aiohttp", "zmq")
"""A configuration is validated on machines that have none of these, and in less time than importing one takes."""
IMPORT_TIMEOUT_S = 60


@dataclass(frozen=True)
class Declared:
    kind: str
    name: str
    contribution: Contribution
    base: Path | None = None


def the_declaration_is_complete(make: Callable[[], Declared]) -> None:
    declared = make()
    contribution = declared.contribution
    assert issubclass(contribution.config, PluginConfig), (
        f"the config {contribution.config.__name__} must derive from prl.contribution.PluginConfig"
    )
    if files.is_reference(declared.name):
        return
    assert contribution.summary.strip(), "the summary is empty: it is the line that `prl plugins` prints"
    undocumented = [
        name for name, field in contribution.config.model_fields.items() if not (field.description or "").strip()
    ]
    assert not undocumented, f"settings without a docstring under them: {', '.join(undocumented)}"


def the_declaration_imports_nothing_heavy(make: Callable[[], Declared]) -> None:
    declared = make()
    if files.is_reference(declared.name):
        raise NotApplicable("a name in a file is imported with the file")
    script = (
        "import sys\nfrom prl import registry\n"
        f"before = set(sys.modules)\nregistry.describe({declared.kind!r}, {declared.name!r})\n"
        f"print(*sorted({{name.partition('.')[0] for name in set(sys.modules) - before}} & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
    assert done.returncode == 0, f"importing the declaration alone failed: {done.stderr.strip()[-500:]}"
    assert not done.stdout.split(), f"declaring it imports {', '.join(done.stdout.split())}: move that into the factory"


def the_factory_exists(make: Callable[[], Declared]) -> None:
    declared = make()
    if declared.kind == "commands":
        raise NotApplicable("a command is loaded when it is called")
    factory = declared.contribution.load_factory()
    assert callable(factory), f"{declared.contribution.factory} is a {type(factory).__name__}, which cannot be called"


CHECKS = [the_declaration_is_complete, the_declaration_imports_nothing_heavy, the_factory_exists]
