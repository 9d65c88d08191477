"""The plugins that documents show are complete: they are written to files and keep their contracts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prl.testing import contracts

SHOWN = [
    ("docs/plugins/env.md", "my_env.py", "envs", "Shout"),
    ("docs/plugins/loss.md", "vanilla.py", "losses", "vanilla"),
    ("docs/plugins/algorithm.md", "half.py", "algorithms", "Half"),
]


@pytest.mark.parametrize(("page", "file", "kind", "name"), SHOWN, ids=[name for *_, name in SHOWN])
def test_it_keeps_its_contract(page: str, file: str, kind: str, name: str, root: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / page).read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if block.startswith(f"# {file}\n")]
    (tmp_path / file).write_text(shown)
    results = contracts.check(kind, f"./{file}:{name}", base=tmp_path)
    broken = [f"{result.check}: {result.detail}" for result in results if not result.ok]
    assert not broken, "\n".join(broken)
    assert sum(not result.skipped for result in results) > 4
