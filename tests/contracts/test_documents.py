"""What the pages for plugin authors show keeps the contract of its kind."""

from __future__ import annotations

import re
from pathlib import Path

from prl.testing import contracts

ROOT = Path(__file__).parents[2]


def test_the_algorithm_of_the_page_keeps_the_contract(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins" / "algorithm.md").read_text()
    (code,) = re.findall(r"```python\n# half\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "half.py").write_text(code)
    results = contracts.check("algorithms", "./half.py:Half", base=tmp_path)
    assert [result for result in results if not result.ok] == []
