"""Which kernels a model gets, and what a refusal says."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prl.errors import EnvironmentNotFit
from prl_models.blocks.attention import Padded
from prl_models.blocks.kernel import AttentionKernel
from prl_models.kernels import choose, choose_attention, flash
from prl_models.options import Kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
module = importlib.import_module("prl_models.kernels.choose")


class Named(Padded):
    def __init__(self, name: str) -> None:
        self.name = name


def missing() -> AttentionKernel:
    raise ImportError("No module named 'flash_attn'")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A GPU of a compute capability with some kernels installed."""

    def make(capability: int, *installed: str) -> None:
        monkeypatch.setattr(module._Need, "capability", property(lambda need: capability if need.device == CUDA else 0))
        for name, candidate in module._CANDIDATES.items():
            made = (lambda name=name: Named(name)) if name in installed else missing
            monkeypatch.setitem(module._CANDIDATES, name, dataclasses.replace(candidate, make=made))

    return make


def test_on_a_cpu_both_are_torch_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen = choose(Kernels(), CPU, torch.float32, 64)
    assert isinstance(chosen.attention, Padded) and chosen.ops.name == "torch"
    assert chosen.kernels == Kernels("padded", "torch")
    assert caplog.messages == [
        "attention: batches of padded documents by torch, because there is no NVIDIA GPU",
        "operations: torch, because there is no GPU",
    ]


@pytest.mark.parametrize(
    ("capability", "installed", "dtype", "head_dim", "windows", "expected"),
    [
        (9, ("flash4", "varlen", "cudnn", "flex"), torch.bfloat16, 128, False, "flash4"),
        (8, ("flash4", "flash2", "varlen"), torch.bfloat16, 128, False, "flash2"),
        (8, ("varlen",), torch.float16, 128, True, "varlen"),
        (9, ("flash4", "varlen"), torch.float32, 128, False, "padded"),
        (9, ("flash4", "varlen"), torch.bfloat16, 512, False, "padded"),
        (10, ("flash4", "varlen"), torch.bfloat16, 192, False, "varlen"),
        (10, ("flash4", "varlen"), torch.bfloat16, 256, False, "flash4"),
        (9, ("cudnn", "flex", "varlen"), torch.bfloat16, 128, False, "varlen"),
        (7, ("flash4", "varlen"), torch.bfloat16, 128, False, "padded"),
    ],
)
def test_the_fastest_that_fits(
    machine: Callable[..., None],
    capability: int,
    installed: tuple[str, ...],
    dtype: torch.dtype,
    head_dim: int,
    windows: bool,
    expected: str,
) -> None:
    machine(capability, *installed)
    kernel, _ = choose_attention("auto", CUDA, dtype, head_dim, windows=windows)
    assert kernel.name == expected


@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "head_dim", "windows", "message"),
    [
        ("flash4", 9, torch.bfloat16, 128, False, r"is not installed .*pip install .flash-attn-4\[cu13\]"),
        ("flash4", 8, torch.bfloat16, 128, False, r"compute capability 9\.0 or newer, and there is 8\.x"),
        ("varlen", 0, torch.bfloat16, 128, False, "needs an NVIDIA GPU"),
        ("flash2", 9, torch.float32, 128, False, "computes torch.bfloat16 and torch.float16, not torch.float32"),
        ("flash2", 9, torch.bfloat16, 100, False, "heads of up to 256 in steps of 8, not 100"),
        ("flash4", 10, torch.bfloat16, 192, False, "on Blackwell it takes heads of up to 128 or of 256, not 192"),
        ("cudnn", 9, torch.bfloat16, 128, True, "has no sliding windows"),
    ],
)
def test_a_refusal_says_what_is_missing(
    machine: Callable[..., None],
    asked: str,
    capability: int,
    dtype: torch.dtype,
    head_dim: int,
    windows: bool,
    message: str,
) -> None:
    machine(capability)
    with pytest.raises(EnvironmentNotFit, match=f'trainer.kernels.attention = "{asked}".*{message}'):
        choose_attention(asked, CUDA, dtype, head_dim, windows=windows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["triton", "liger", "quack"])
def test_operations_of_a_gpu_are_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(EnvironmentNotFit, match=f'trainer.kernels.operations = "{name}" needs a GPU.*cpu'):
        choose(Kernels(operations=name), CPU, torch.float32, 64)  # type: ignore[arg-type]


def test_what_flash_attention_4_compiles_is_kept_where_the_user_alone_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    enabled, folder = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (enabled, folder):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    flash._keep_compiled()
    assert os.environ[enabled] == "1" and Path(os.environ[folder]).is_relative_to(tmp_path)
    monkeypatch.setenv(enabled, "0")
    flash._keep_compiled()
    assert os.environ[enabled] == "0"  # the user's own choice
