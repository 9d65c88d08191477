"""Two GPUs against one: do FSDP and context parallelism compute the same, and how much faster is FSDP?

Parity: a model of random weights (of Qwen3-0.6B's shapes; larger than usual, so that distributions are peaked) scores
two packed rows and trains one step on them, in one process and in two with every layout. Compared are the largest
difference of a log-probability, relative to the largest, and the norm of the gradient; and, layer by layer, how far the
gradient of each precision lies from the one that one process computes in float32. Rounding moves both by as much.

Scaling: `prl bench trainer` on one GPU and on all of them, with a row for each rank ("fsdp") or one row that all share
("ulysses", "ring"); efficiency is tokens per second on all, divided by those of one times their number.

    python benchmarks/h200_scaling.py [--layouts fsdp,ulysses,ring] [--scaling fsdp] [--seconds 500]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from prl.config.bench import BenchConfig
from prl.testing.numerics import relative_error
from prl_trainer_fsdp.bench.data import denominators, synthetic_rows, with_sampler
from prl_trainer_fsdp.bench.run import device_name, versions
from prl_trainer_fsdp.bench.shapes import shapes_of, write_model
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import Learner
from prl_trainer_fsdp.parallel.runtime import Runtime, start
from prl_trainer_fsdp.parallel.sharding import gather

HERE = Path(__file__).parent
RESULT = HERE / "results" / "h200_scaling.json"
LAYOUTS = ("fsdp", "ulysses", "ring")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Of log-probabilities and of the gradient's norm, both relative: rounding in another order, 28 layers deep."""
STD = 0.05
"""Of the random weights: with tied embeddings of 1,024 dimensions, logits of standard deviation 1.6."""

SAMPLED = 1 << 16
"""Elements of each parameter's gradient that are compared."""

Found = dict[str, Any]


# --- parity: what each process does -----------------------------------------------------------------------


def compute(request: Path) -> None:
    """Every layout in every precision that was asked for, one after another; the leader writes found-WORLD.json."""
    asked = json.loads(request.read_text())
    runtime = start(configuration(asked, "fsdp", "float32", "")[0])
    model = request.parent / "model"
    if runtime.is_leader and not (model / "config.json").exists():
        write_model(asked["shapes"], model, runtime.device, 0, std=STD)
    if runtime.world > 1:
        dist.barrier()
    found = []
    for layout in asked["layouts"] if runtime.world > 1 else ["one"]:
        for dtype in asked["dtypes"]:
            found.append({"layout": layout, "dtype": dtype, **once(asked, layout, dtype, model, runtime)})
            gc.collect()
            if runtime.device.type == "cuda":
                torch.cuda.empty_cache()
    if runtime.is_leader:
        hardware = {"hardware": device_name(runtime.device), "versions": versions()}
        (request.parent / f"found-{runtime.world}.json").write_text(json.dumps({"found": found, **hardware}))
    if dist.is_initialized():
        dist.destroy_process_group()


def once(asked: Found, layout: str, dtype: str, model: Path, runtime: Runtime) -> Found:
    """Log-probabilities of all documents before a step, and the step's loss and norm of the gradient."""
    config, own = configuration(asked, layout, dtype, str(model), runtime.world)
    if runtime.world > 1:  # the same processes, laid out anew
        runtime = runtime.laid_out(own)
    learner = Learner(config.model, own, config.loss.build(), runtime)
    rows = [with_sampler(row, near_uniform, (0,)) for row in synthetic_rows(config.bench, asked["vocab_size"], (0,))]
    documents = [part.tolist() for row in rows for part in np.split(row.token_ids, row.cu_seqlens[1:-1])]
    logprobs = [value for scored in learner.score(documents) for value in scored]
    mine = rows[runtime.data_rank :: runtime.layout.data_ranks]
    samples: dict[str, torch.Tensor] = {}
    learner.mark = lambda part: samples.update(gradients(learner)) if part == "optimizer" else None
    metrics = learner.step(mine, denominators(rows, 1), 0)
    if runtime.is_leader:
        save_file(samples, model.parent / f"{layout}-{dtype}.safetensors")
        print(f"{runtime.world} processes, {layout}, {dtype}: computed", flush=True)
    return {"logprobs": logprobs, "loss": metrics["train/loss"], "grad_norm": metrics["train/grad_norm"]}


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Of every parameter at most `SAMPLED` elements of its gradient, evenly spread. Collective."""
    found = {}
    for name, parameter in learner.parameters():
        assert parameter.grad is not None, name
        whole = gather(parameter.grad).flatten()
        # A copy: what follows scales gradients in place.
        found[name] = whole[:: -(-len(whole) // SAMPLED)].to("cpu", torch.float32, copy=True)
    return found


def configuration(asked: Found, layout: str, dtype: str, model: str, world: int = 1) -> tuple[BenchConfig, FsdpConfig]:
    cp = world if layout in ("ulysses", "ring") else 1
    trainer: Found = {"use": "fsdp", "device": asked["device"], "threads": asked["threads"], "cp": cp}
    if cp > 1:
        trainer["cp_style"] = layout
    table = {"documents": asked["documents"], "rows": asked["rows"], "shapes": asked["shapes"]}
    config = BenchConfig.model_validate({"model": {"path": model, "dtype": dtype}, "trainer": trainer, "bench": table})
    return config, cast(FsdpConfig, config.trainer.plugin_config())


def near_uniform(documents: Sequence[Sequence[int]]) -> list[list[float]]:
    """The same for every layout, whatever a layout computes."""
    return [[-8.0] * len(document) for document in documents]


# --- what starts them and compares ------------------------------------------------------------------------


def parity(options: argparse.Namespace, folder: Path) -> Iterator[Found]:
    """One row for every layout and precision."""
    request = folder / "parity.json"
    request.write_text(
        json.dumps(
            {
                "device": options.device,
                "threads": 1 if options.device == "cpu" else 0,
                "shapes": options.shapes,
                "vocab_size": options.vocab_size,
                "layouts": options.layouts,
                "dtypes": options.dtypes,
                "documents": options.documents,
                "rows": options.world,
            }
        )
    )
    command = [str(Path(__file__)), "--compute", str(request)]
    run([sys.executable, *command], options)
    run([sys.executable, "-m", "prl_trainer_fsdp.ranks", str(options.world), *command], options)
    one = json.loads((folder / "found-1.json").read_text())
    several = json.loads((folder / f"found-{options.world}.json").read_text())
    reference = {found["dtype"]: found for found in one["found"]}
    for found in several["found"]:
        expected, tolerance = reference[found["dtype"]], TOLERANCES[found["dtype"]]
        logprobs = relative_error(torch.tensor(expected["logprobs"]), torch.tensor(found["logprobs"]))
        norm = abs(found["grad_norm"] / expected["grad_norm"] - 1)
        yield {
            "kind": "parity",
            "layout": found["layout"],
            "dtype": found["dtype"],
            "world": options.world,
            "logprobs": logprobs,
            "grad_norm": norm,
            "loss": abs(found["loss"] / expected["loss"] - 1),
            "tolerance": tolerance,
            **(from_float32(folder, found, reference) if "float32" in reference else {}),
            "agrees": bool(logprobs <= tolerance and norm <= tolerance),
            "model": options.shapes if isinstance(options.shapes, str) else "tiny",
            "documents": options.documents,
            "hardware": several["hardware"],
            "versions": several["versions"],
            "date": date.today().isoformat(),
        }


def from_float32(folder: Path, found: Found, reference: dict[str, Found]) -> Found:
    """How far gradients lie from the one that one process computes in float32: those of one process in this precision
    and those of several. By layer: |g - g32| / |g32| over what was sampled, and the same between the two."""
    exact = load_file(folder / "one-float32.safetensors")
    one = load_file(folder / f"one-{found['dtype']}.safetensors")
    several = load_file(folder / f"{found['layout']}-{found['dtype']}.safetensors")
    layers: dict[str, list[str]] = {}
    for name in exact:
        parts = name.split(".")
        place = parts.index("layers") if "layers" in parts else None
        layers.setdefault(".".join(parts[place : place + 2]) if place is not None else name, []).append(name)

    def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], names: Sequence[str]) -> float:
        apart, size = (
            sum(float(tensor.double().square().sum()) for tensor in tensors)
            for tensors in ([a[name] - b[name] for name in names], [exact[name] for name in names])
        )
        return float(f"{(apart / size) ** 0.5:.3g}") if size else 0.0

    def three(names: Sequence[str]) -> list[float]:
        return [distance(one, exact, names), distance(several, exact, names), distance(one, several, names)]

    norm = reference["float32"]["grad_norm"]
    return {
        "gradient": three(list(exact)),
        "gradient_layers": {layer: three(names) for layer, names in layers.items()},
        "norm_from_float32": [
            abs(reference[found["dtype"]]["grad_norm"] / norm - 1),
            abs(found["grad_norm"] / norm - 1),
        ],
    }


def scaling(layout: str, options: argparse.Namespace, folder: Path) -> Found:
    """Tokens per second of one process and of all."""
    place = folder / "scaling"
    place.mkdir(exist_ok=True)
    rows = [bench(layout, world, options, place) for world in (1, options.world)]
    one, several = (row["tokens_per_s"] for row in rows)
    kept = ("model", "seq_len", "documents", "recompute", "kernels", "hardware", "versions", "date")
    return {
        "kind": "scaling",
        "layout": layout,
        "world": options.world,
        "one": one,
        "all": several,
        "efficiency": round(several / (options.world * one), 4),
        "peak_gib": [row["peak_gib"] for row in rows],
        "parts": [row["parts"] for row in rows],
        "step_s": [row["step_s"] for row in rows],
        **{key: rows[1][key] for key in kept},
    }


def bench(layout: str, world: int, options: argparse.Namespace, place: Path) -> Found:
    request = place / "request.json"
    shared = layout != "fsdp"
    trainer: Found = {"use": "fsdp", "processes": world, "device": options.device}
    trainer |= {"threads": 1} if options.device == "cpu" else {}
    trainer |= {"cp": world, "cp_style": layout} if shared and world > 1 else {}
    documents = options.scaling_documents or ([65536] if shared else [16384])
    table = {"shapes": options.shapes, "documents": documents, "steps": options.steps, "warmup": 2}
    trainer["recompute"] = "selective" if sum(documents) > 20_000 else "none"
    request.write_text(json.dumps({"model": {"dtype": "bfloat16"}, "trainer": trainer, "bench": table}))
    command = ["-m", "prl_trainer_fsdp.bench", str(request)]
    if world > 1:
        command = ["-m", "prl_trainer_fsdp.ranks", str(world), *command]
    run([sys.executable, *command], options)
    (row,) = json.loads((place / "rows.json").read_text())
    return dict(row)


def run(command: list[str], options: argparse.Namespace) -> None:
    """Raises: SystemExit: it failed, or no time is left. Ranks are ended by SIGTERM, which their parent hands on."""
    process = subprocess.Popen(command)
    try:
        code = process.wait(max(1.0, options.ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        sys.exit(f"no time left for {' '.join(command[1:])}")
    if code:
        sys.exit(f"exit code {code}: {' '.join(command[1:])}")


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layouts", type=words, default=list(LAYOUTS), help="whose parity is checked")
    parser.add_argument("--dtypes", type=words, default=["bfloat16", "float32"])
    parser.add_argument("--documents", type=numbers, default=[1500, 700, 1896], help="of a row, for parity")
    parser.add_argument("--scaling", type=words, default=["fsdp"], help="layouts that are timed")
    parser.add_argument("--scaling-documents", type=numbers, help="instead of one of 16,384, or 65,536 where shared")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--shapes", default="qwen3-0.6b", help="a known name, or a table as JSON")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if options.shapes.startswith("{"):
        options.shapes = json.loads(options.shapes)
    options.vocab_size = int(shapes_of(options.shapes)["vocab_size"])
    options.ends = time.monotonic() + options.seconds
    return options


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--compute"]:
        compute(Path(argv[1]))
        return 0
    options = parsed(argv)
    rows: list[Found] = []

    def record(row: Found) -> None:
        rows.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        shown = ("layout", "dtype", "logprobs", "grad_norm", "agrees", "one", "all", "efficiency")
        print(", ".join(f"{key} {row[key]}" for key in shown if key in row), flush=True)

    with tempfile.TemporaryDirectory(prefix="prl-scaling-") as folder:
        if options.layouts:
            for row in parity(options, Path(folder)):
                record(row)
        for layout in options.scaling:
            record(scaling(layout, options, Path(folder)))
    return 0 if all(row.get("agrees", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
