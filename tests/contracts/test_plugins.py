"""Every installed plugin of ours keeps the contract of its kind, through the same door as anyone's: `contracts.check`."""

from __future__ import annotations

from typing import Any

import pytest

from prl import registry
from prl.contribution import KINDS
from prl.testing import contracts

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("channels", "filesystem"): {"visibility_s": 0.05},
}
OURS = [
    (kind, name) for kind in KINDS for name, entry in registry.names(kind).items() if entry.distribution.startswith("prl-")
]


@pytest.mark.parametrize(("kind", "name"), OURS, ids=lambda value: value)
def test_it_keeps_its_contract(kind: str, name: str) -> None:
    results = contracts.check(kind, name, SETTINGS.get((kind, name)))
    broken = [f"{result.check}: {result.detail}" for result in results if not result.ok]
    assert not broken, "\n".join(broken)
    assert [result for result in results if not result.skipped]
