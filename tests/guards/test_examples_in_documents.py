"""The plugins that documents show are complete: they are written to files and keep their contracts, or are used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from prl import registry
from prl.hooks import MonitorObserver, Observers, RunInfo
from prl.testing import contracts
from prl.testing.fakes import fake_config

SHOWN = [
    ("docs/plugins/env.md", "my_env.py", "envs", "Shout"),
    ("docs/plugins/loss.md", "vanilla.py", "losses", "vanilla"),
    ("docs/plugins/algorithm.md", "half.py", "algorithms", "Half"),
]


def write(page: str, file: str, root: Path, folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (root / page).read_text(), re.DOTALL)
    (shown,) = [block for block in blocks if block.startswith(f"# {file}\n")]
    (folder / file).write_text(shown)


@pytest.mark.parametrize(("page", "file", "kind", "name"), SHOWN, ids=[name for *_, name in SHOWN])
def test_it_keeps_its_contract(page: str, file: str, kind: str, name: str, root: Path, tmp_path: Path) -> None:
    write(page, file, root, tmp_path)
    results = contracts.check(kind, f"./{file}:{name}", base=tmp_path)
    broken = [f"{result.check}: {result.detail}" for result in results if not result.ok]
    assert not broken, "\n".join(broken)
    assert sum(not result.skipped for result in results) > 4


def test_the_monitor_of_its_page_is_told_of_a_run(root: Path, tmp_path: Path) -> None:
    write("docs/plugins/monitor.md", "lines.py", root, tmp_path)
    monitor = registry.build("monitors", "./lines.py:Lines", {"path": str(tmp_path / "all.jsonl")}, base=tmp_path)
    observers = Observers(RunInfo("run", tmp_path / "run", fake_config()), [MonitorObserver("lines", monitor)])
    observers.emit("prl_run_started", resumed_from=None)
    observers.emit("prl_step_finished", step=1, metrics={"reward/mean": 0.5})
    observers.emit("prl_run_finished", outcome="completed")
    assert observers.close() and not observers.muted
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert lines == [{"run": "run", "step": 1, "reward/mean": 0.5}, {"run": "run", "outcome": "completed"}]
