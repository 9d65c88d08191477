"""Triton kernels against plain torch, in Triton's interpreter: everything but what a GPU's compiler makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

LIMITS = {"float32": 2e-5, "bfloat16": 4e-2}
"""Relative to the largest value. The interpreter cuts to bfloat16 instead of rounding, which doubles its errors."""
CASES = {"float32": 24, "bfloat16": 24}


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, list[float]]]:
    program = Path(__file__).with_name("triton_parity.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dtype", LIMITS)
def test_values_and_gradients(errors: dict[str, dict[str, list[float]]], dtype: str) -> None:
    assert len(errors[dtype]) == CASES[dtype]
    wrong = {name: found for name, found in errors[dtype].items() if not max(found) <= LIMITS[dtype]}
    assert not wrong, wrong
