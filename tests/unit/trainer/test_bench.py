"""`prl bench trainer`: the real step on synthetic rows, in one process and through the command with two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prl.config.bench import BenchConfig, BenchTable
from prl.errors import ConfigError
from prl.flops import step_flops
from prl_trainer_fsdp.bench.data import denominators, synthetic_rows, with_sampler
from prl_trainer_fsdp.bench.named import SHAPES
from prl_trainer_fsdp.bench.parts import Clock, Measured, category, measure
from prl_trainer_fsdp.bench.run import FORMULA, bench, report
from prl_trainer_fsdp.bench.shapes import shapes_of, write_model
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner

from .helpers import CPU

KEYS = {"model", "seq_len", "documents", "recompute", "kernels", "tokens_per_s", "mfu", "peak_gib", "hardware"} | {
    "versions",
    "date",
    "parts",
    "world",
    "lora",
    "step_s",
}
TINY = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def a_config(**values: Any) -> BenchConfig:
    own = {"use": "fsdp", "threads": 1, "device": "cpu", **values.pop("trainer", {})}
    table = {"shapes": TINY, "documents": [20, 5, 9], "warmup": 1, "steps": 2, **values.pop("bench", {})}
    return BenchConfig.model_validate({"trainer": own, "bench": table, **values})


def measured(config: BenchConfig, folder: Path) -> dict[str, Any]:
    return bench(config, config.trainer.plugin_config(), CPU, folder)  # type: ignore[arg-type]


def test_a_row_says_what_was_measured(tmp_path: Path) -> None:
    row = measured(a_config(bench={"rows": 2}), tmp_path)
    assert row.keys() >= KEYS
    assert (row["seq_len"], row["documents"], row["world"], row["lora"]) == (34, [20, 5, 9], 1, 0)
    assert len(row["step_s"]) == 2
    middle = sum(sorted(row["step_s"])) / 2
    assert row["tokens_per_s"] == pytest.approx(68 / middle, rel=1e-2)
    assert row["mfu"] is None and row["peak_gib"] > 0
    assert list(row["parts"]) == ["rows", "forward", "backward", "metrics", "optimizer"]
    assert sum(row["parts"].values()) <= 1.05 * max(row["step_s"])
    assert row["model_tflops"] == round(step_flops(TINY, [[20, 5, 9]] * 2).model / 1e12, 3)
    assert FORMULA not in report(row) and FORMULA in report(row | {"mfu": 0.5})  # an MFU needs a peak


def test_supervised_rows_are_measured_with_their_loss(tmp_path: Path) -> None:
    assert measured(a_config(loss={"use": "ce"}), tmp_path)["tokens_per_s"] > 0


def test_the_step_is_a_step_of_reinforcement_learning(tmp_path: Path) -> None:
    """The sampler is near the policy, every token but a document's first is trained, parameters move."""
    write_model(TINY, tmp_path / "model", CPU.device, 0)
    config = a_config(model={"path": str(tmp_path / "model")})
    learner = Learner(config.model, FsdpConfig(lr=1e-2), config.loss.build(), CPU)
    (row,) = synthetic_rows(config.bench, learner.model.vocab_size, (0, 0))
    row = with_sampler(row, learner.score, (0, 0))
    before = [parameter.detach().clone() for _, parameter in learner.parameters()]
    found = learner.step([row], denominators([row], 1), 0)
    assert found["train/trained_tokens"] == 31 and denominators([row], 3)["rl"] == 93
    assert 0 < found["mismatch/kl"] < 1e-3
    assert found["loss/dropped"] == 0
    moved = [not torch.equal(was, now) for was, (_, now) in zip(before, learner.parameters(), strict=True)]
    assert all(moved)


def test_rows_differ_between_ranks_and_repeat() -> None:
    table = BenchTable(documents=(5, 3), rows=2)
    first, again, other = (synthetic_rows(table, 50, (0, rank)) for rank in (0, 0, 1))
    assert np.array_equal(first[1].token_ids, again[1].token_ids)
    assert not np.array_equal(first[0].token_ids, first[1].token_ids)
    assert not np.array_equal(first[0].token_ids, other[0].token_ids)
    assert first[0].sampled.tolist() == [False, *[True] * 4, False, True, True]


def test_the_clock_adds_parts_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 3.0, 4.0, 9.0])
    monkeypatch.setattr("prl_trainer_fsdp.bench.parts.time.perf_counter", lambda: next(ticks))
    clock = Clock(CPU.device)
    for part in ("forward", "backward", "forward", "backward"):
        clock.mark(part)
    assert clock.finish() == {"forward": 2.0, "backward": 7.0}


def test_warm_up_is_not_timed() -> None:
    calls: list[Clock] = []
    found = measure(calls.append, CPU.device, 3, 2)
    assert isinstance(found, Measured) and len(calls) == 5 and len(found.step_s) == 2


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", "communication"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_0", "triton"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>", "other"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, expected: str) -> None:
    assert category(kernel) == expected


def test_shapes_are_known_by_name_or_refused() -> None:
    assert SHAPES["qwen3-0.6b"]["hidden_size"] == 1024
    with pytest.raises(ConfigError, match=r"qwen3-9b.*qwen3-0\.6b"):
        shapes_of("qwen3-9b")
    with pytest.raises(ConfigError, match="model_type"):
        shapes_of({"hidden_size": 3})


def test_the_command_measures_several_ranks(tmp_path: Path) -> None:
    tables = "\n".join(f"{key} = {json.dumps(value)}" for key, value in TINY.items())
    file, out, profile = tmp_path / "bench.toml", tmp_path / "rows.json", tmp_path / "profile.txt"
    file.write_text(f"[bench.shapes]\n{tables}\n[trainer]\nthreads = 1\ndevice = 'cpu'\nprocesses = 2\n")
    options = ["--documents", "12,7", "--rows", "1", "--steps", "2", "--warmup", "1"]
    command = [sys.executable, "-m", "prl_cli", "bench", "trainer", str(file), *options]
    done = subprocess.run(
        [*command, "--json", str(out), "--profile", str(profile)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(out.read_text())
    assert row.keys() >= KEYS
    assert (row["world"], row["documents"], row["mesh"]["dp"]) == (2, [12, 7], 2)
    assert row["tokens_per_s"] == pytest.approx(2 * 19 / (sum(row["step_s"]) / 2), rel=1e-2)
    assert row["parts"]["communication"] > 0
    assert "2 documents" in done.stdout and "aten::mm" in profile.read_text()
