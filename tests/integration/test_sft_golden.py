"""The loss curve of one fixed supervised run is the one on file: see `tests/golden/sft_loss.py`."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "golden" / "sft_loss.py"


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sft_loss", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_loss_curve_is_the_one_on_file(golden: ModuleType, tmp_path: Path) -> None:
    measured = golden.curve(tmp_path)
    assert measured[-1]["eval/loss"] < 0.9 * measured[0]["eval/loss"], "it learns"
    recorded = golden.recorded()
    if any(one["curve"] == measured for one in recorded):
        return
    here = golden.environment()
    same = [one for one in recorded if one["environment"] == here]
    difference = golden.worst(measured, (same or recorded)[0]["curve"])
    remedy = "either a mistake, or run `python tests/golden/sft_loss.py` and say in the commit why it changed"
    assert not same, f"the loss curve differs by {difference:.1e} from that of this environment on file: {remedy}"
    assert difference <= golden.TOLERANCE, f"the loss curve differs by {difference:.1e} from the one on file: {remedy}"
    warnings.warn(
        f"no curve on file was made in {here}: compared within {golden.TOLERANCE:g}, the difference is "
        f"{difference:.1e}; `python tests/golden/sft_loss.py` adds this environment",
        stacklevel=1,
    )
