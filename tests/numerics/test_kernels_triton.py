"""Triton kernels against plain torch in Triton's interpreter, and that Triton compiles them for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

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


def compile_for_hopper(function: Any, arguments: str, warps: int = 4, **constants: Any) -> str:
    """The PTX of a kernel. arguments: a letter each in order: b, f and l are pointers to bfloat16, float32 and int64,
    i an int32 that is a multiple of 16, n any int32, x a float32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"b": "*bf16", "f": "*fp32", "l": "*i64", "i": "i32", "n": "i32", "x": "fp32"}
    letters = iter(arguments)
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        letter = "" if name in constants else next(letters)
        signature[name] = kinds[letter] if letter else "constexpr"
        if letter in ("b", "f", "l", "i"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    assert next(letters, None) is None, "fewer arguments than letters"
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return str(compiled.asm["ptx"])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
def test_they_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shapes of Qwen3-0.6B, and every access to memory 16 bytes wide where a row allows it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from prl_models.kernels import activation, norm, rotary, rotary_kernels, softmax

    tile = {"BLOCK": 1024, "ROWS": 2}
    heads = rotary.constants(*(torch.empty(1, n, 128) for n in (16, 8)), True, True, torch.empty(1, 64))
    warps = int(heads.pop("num_warps"))
    found = {
        "norm": compile_for_hopper(norm._forward_kernel, "bbfbbniiix", RESIDUAL=True, **tile),
        "norm backward": compile_for_hopper(
            norm._backward_kernel, "bbbfbfnniiiix", BESIDE=True, WEIGHT_GRAD=True, **tile
        ),
        "rotary": compile_for_hopper(rotary_kernels.forward_kernel, "bbbbffbbiiiix", warps, **heads),
        "rotary backward": compile_for_hopper(
            rotary_kernels.backward_kernel, "bbbbbbbbffbbfn" + "i" * 16 + "x", warps, **heads
        ),
        "swiglu": compile_for_hopper(activation._forward_kernel, "bbii", BLOCK=1024),
        "swiglu backward": compile_for_hopper(activation._backward_kernel, "bbbiii", BLOCK=1024),
        "statistics": compile_for_hopper(softmax._statistics_kernel, "blffffii", 8, BLOCK=4096),
        "gradient": compile_for_hopper(softmax._gradient_kernel, "blfffffii", 8, ENTROPY=True, BLOCK=4096),
    }
    narrow = [name for name, ptx in found.items() if "ld.global.v4" not in ptx]
    assert not narrow, f"16-byte loads are missing from {narrow}"
