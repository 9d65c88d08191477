"""Measure a training step on synthetic data.

REQUEST is a `BenchConfig` as JSON. The step is `Learner.step`, the one that runs train with: model, loss, optimiser and
ranks are those of the configuration; only the rows are made up (`data`). The leader prints a report, and writes a
list of one row to rows.json beside REQUEST. PROFILE is where a profile of one more step goes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from prl.config.bench import BenchConfig
from prl.config.load import read_resolved
from prl.config.schema import ModelTable
from prl.errors import PrlError
from prl.flops import StepFlops, peak, step_flops
from prl_models.provider import read_config
from prl_trainer_fsdp.bench.data import denominators, synthetic_rows, with_sampler
from prl_trainer_fsdp.bench.parts import Clock, Measured, communication_s, kernel_times, measure, profiled, save_profile
from prl_trainer_fsdp.bench.shapes import write_model
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner
from prl_trainer_fsdp.parallel.runtime import Runtime, max_over_ranks, start

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4", "liger-kernel", "quack-kernels")
FORMULA = "MFU = (products 6 P T + attention 7 n^2 h d a layer and document) / (seconds x peak)"
FORMULA_LORA = "MFU = (products (4 P + 6 adapters) T + attention 7 n^2 h d a layer and document) / (seconds x peak)"
GIB = 1 << 30

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    request = Path(argv[0])
    try:
        config = read_resolved(request, BenchConfig)
        own = cast(FsdpConfig, config.trainer.plugin_config())
        disable_progress_bar()
        runtime = start(config)
        if runtime.is_leader:
            say_choices()
        row = bench(config, own, runtime, request.parent, Path(argv[1]) if len(argv) > 1 else None)
    except PrlError as error:
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return error.exit_code
    if runtime.is_leader:
        print(report(row), flush=True)
        request.with_name("rows.json").write_text(json.dumps([row], indent=1) + "\n")
    return 0


def bench(config: BenchConfig, own: FsdpConfig, runtime: Runtime, folder: Path, profile: Path | None = None) -> Row:
    """Build, warm up, measure. Collective.

    Args:
        folder: where a model of random weights is put.

    Returns:
        The row of the result file.
    """
    table = model_table(config, runtime, folder)
    learner = Learner(table, own, config.loss.build(), runtime)
    replicas = runtime.layout.data_ranks
    generator = (config.seed, runtime.data_rank)
    rows = synthetic_rows(config.bench, learner.model.vocab_size, generator, supervised=config.loss.use == "ce")
    rows = [with_sampler(row, learner.score, generator) for row in rows]
    whole = denominators(rows, replicas)

    def step(clock: Clock) -> None:
        learner.mark = clock.mark
        learner.step(rows, whole, 0)

    measured = measure(step, runtime.device, config.bench.warmup, config.bench.steps)
    traced = profiled(step, runtime.device) if profile is not None or runtime.world > 1 else None
    hf_config = read_config(table.path)
    lora = own.lora
    flops = step_flops(
        hf_config,
        [config.bench.documents] * (config.bench.rows * replicas),
        lora_rank=lora.rank if lora else 0,
        lora_targets=lora.targets if lora else (),
    )
    row = result(measured, flops, runtime, float(sum(config.bench.documents) * config.bench.rows * replicas))
    if traced is not None and runtime.world > 1:
        row["parts"]["communication"] = _rounded(communication_s(traced))
    if traced is not None and profile is not None and runtime.is_leader:
        save_profile(traced, profile)
        row["profile_ms"] = kernel_times(traced)
    return {
        "trainer": "prl",
        "model": model_name(config),
        "seq_len": sum(config.bench.documents),
        "documents": list(config.bench.documents),
        "recompute": own.recompute,
        "kernels": {
            "attention": learner.model.kernels.attention,
            "operations": learner.model.kernels.operations,
            "impl": implementation(learner.model),
            "compile": own.compile,
        },
        "dtype": config.model.dtype,
        "optimizer": own.optimizer,
        "rows": config.bench.rows,
        "lora": lora.rank if lora else 0,
        "mesh": {"dp": replicas, "cp": own.cp, "cp_style": own.cp_style},
        **row,
    }


def model_table(config: BenchConfig, runtime: Runtime, folder: Path) -> ModelTable:
    """The model to load: the one of the configuration, or one of random weights that the leader writes."""
    if not config.bench.shapes:
        return config.model
    path = folder / "model"
    if runtime.is_leader and not (path / "config.json").exists():  # of a former measurement in this folder
        write_model(config.bench.shapes, path, runtime.device, config.seed)
    if runtime.world > 1:
        dist.barrier()
    return config.model.model_copy(update={"path": str(path)})


def say_choices() -> None:
    """Which model code and kernels are taken, and why, is logged where it is decided."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("prl_models", "prl_trainer_fsdp"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def implementation(model: Any) -> str:
    """ "hf" for transformers' own code, else "custom"; sharding makes a subclass of whatever class it was."""
    return "hf" if any(kind.__module__.startswith("prl_models.hf") for kind in type(model).__mro__) else "custom"


def model_name(config: BenchConfig) -> str:
    shapes = config.bench.shapes
    if isinstance(shapes, dict):
        return f"{shapes.get('model_type', 'model')}-{shapes.get('num_hidden_layers')}x{shapes.get('hidden_size')}"
    return shapes or Path(config.model.path).name


def result(measured: Measured, flops: StepFlops, runtime: Runtime, tokens: float) -> Row:
    """What every measured step has in common, whoever's it is. The slowest rank and the fullest count."""
    extremes = torch.tensor([*measured.step_s, measured.peak_bytes], dtype=torch.float64, device=runtime.device)
    values = max_over_ranks(extremes, runtime).tolist()
    step_s, peak_bytes = values[:-1], values[-1]
    seconds = median(step_s)
    hardware = device_name(runtime.device)
    most = peak(hardware) if runtime.device.type == "cuda" else None
    available = None if most is None else seconds * most * runtime.world
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "mfu": None if available is None else round(flops.model / available, 4),
        "mfu_published": None if available is None else round(flops.published / available, 4),
        "model_tflops": round(flops.model / 1e12, 3),
        "peak_gib": round(peak_bytes / GIB, 2),
        "parts": {name: _rounded(value) for name, value in measured.parts.items()},
        "step_s": [_rounded(value) for value in step_s],
        "world": runtime.world,
        "hardware": hardware,
        "versions": versions(),
        "date": date.today().isoformat(),
    }


def report(row: Row) -> str:
    """For a person."""
    documents = row["documents"]
    shown = f"{len(documents)} documents" if len(documents) > 1 else "one document"
    formula = FORMULA_LORA if row["lora"] else FORMULA
    mfu = "-   (needs a GPU whose peak is known)" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%   {formula}"
    lines = [
        f"{row['model']}: {row['seq_len']:,} tokens a row as {shown}, {row['world']} x {row['hardware']}",
        f"  kernels     {', '.join(f'{name} {value}' for name, value in row['kernels'].items())}",
        f"  recompute   {row['recompute']}" + (f", LoRA rank {row['lora']}" if row["lora"] else ""),
        f"  tokens/s    {row['tokens_per_s']:,.0f}   (median of {len(row['step_s'])} steps)",
        f"  MFU         {mfu}",
        f"  peak        {row['peak_gib']:.2f} GiB",
        f"  step        {1000 * median(row['step_s']):.1f} ms",
        *(f"    {name:<14}{1000 * value:9.1f} ms" for name, value in row["parts"].items()),
    ]
    if "communication" in row["parts"]:
        lines.append("    (communication runs beside computation: it is not a share of the sum)")
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _rounded(seconds: float) -> float:
    return round(seconds, 5)
