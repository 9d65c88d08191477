"""Every installed plugin of ours keeps the contract of its kind, through anyone's door: `contracts.check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prl import registry
from prl.contribution import KINDS
from prl.testing import contracts

ON_A_GPU = {("channels", "cuda_ipc"), ("channels", "nccl")}
OURS = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=(pytest.mark.gpu,) if (kind, name) in ON_A_GPU else ())
    for kind in KINDS
    for name, entry in registry.names(kind).items()
    if entry.distribution.startswith("prl-")
]


def settings(kind: str, name: str, folder: Path) -> dict[str, Any] | None:
    """What a plugin needs to be built, or what makes its checks quick."""
    if kind == "channels":
        return {"visibility_s": 0.05}
    if (kind, name) == ("envs", "jsonl"):
        (folder / "tasks.jsonl").write_text(
            "".join(f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(90))
        )
        (folder / "reward.py").write_text(
            "def score(task, text):\n    return float(text.strip() == task.data['answer'])\n"
        )
        return {"path": str(folder / "tasks.jsonl"), "reward": f"{folder / 'reward.py'}:score"}
    return None


@pytest.mark.parametrize(("kind", "name"), OURS)
def test_it_keeps_its_contract(kind: str, name: str, tmp_path: Path) -> None:
    results = contracts.check(kind, name, settings(kind, name, tmp_path))
    broken = [f"{result.check}: {result.detail}" for result in results if not result.ok]
    assert not broken, "\n".join(broken)
    skipped = [f"{result.check}: {result.detail}" for result in results if result.skipped]
    assert kind not in contracts.SUITES or len(results) - len(skipped) > 3, f"nothing was checked: {skipped}"
