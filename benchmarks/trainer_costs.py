"""What beside a step's forward and backward costs a trainer time: the optimiser, and checkpoints.

    python benchmarks/trainer_costs.py                                  Qwen3-0.6B shapes on one GPU
    python benchmarks/trainer_costs.py --device cpu --shapes tiny --tokens 64 --out /tmp/rows.json

optimizers   the whole step and its optimiser's part, with AdamW and with Muon
checkpoint   how long training stands still for a snapshot (the first one also reserves and locks memory), how long the
             files take, and how long steps take meanwhile; beside them a checkpoint that training waits for

Each optimiser is a process of its own. Rows go to benchmarks/results/h200_trainer_costs.json as soon as they are there.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, cast

HERE = Path(__file__).parent
RESULT = HERE / "results" / "h200_trainer_costs.json"
PARTS = ("optimizers", "checkpoint")
MOST_STEPS = 200
"""While files are written; on a fast disk there are a few."""

Found = dict[str, Any]


def optimizers(options: argparse.Namespace, folder: Path) -> Iterator[Found]:
    for optimizer in options.optimizers:
        request = folder / "request.json"
        request.write_text(json.dumps(asked(options, optimizer)))
        command = [sys.executable, "-P", "-m", "prl_trainer_fsdp.bench", str(request)]
        try:
            code = subprocess.run(command, timeout=options.seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"SKIPPED {optimizer}: more than {options.seconds:.0f} s", flush=True)
            continue
        if code:
            print(f"FAILED {optimizer}: exit code {code}", flush=True)
            continue
        (row,) = json.loads(request.with_name("rows.json").read_text())
        yield {"kind": "optimizer", **row}


def asked(options: argparse.Namespace, optimizer: str = "adamw") -> Found:
    """A `BenchConfig`."""
    from trainer_peer import TINY

    trainer: Found = {"use": "fsdp", "device": options.device, "optimizer": optimizer}
    if options.device == "cpu":
        trainer["threads"] = 1
    shapes = TINY if options.shapes == "tiny" else options.shapes
    table = {"shapes": shapes, "documents": [options.tokens], "steps": options.steps, "warmup": 2}
    return {"model": {"dtype": "bfloat16"}, "trainer": trainer, "bench": table}


def checkpoint(options: argparse.Namespace, folder: Path) -> Iterator[Found]:
    """In a process of its own, like the optimisers."""
    out = folder / "checkpoint.json"
    request = {"config": asked(options), "out": str(out), "folder": str(folder), "seconds": options.seconds}
    (folder / "asked.json").write_text(json.dumps(request))
    command = [sys.executable, "-P", __file__, "--measure", str(folder / "asked.json")]
    try:
        code = subprocess.run(command, timeout=options.seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 124
    if code:
        print(f"FAILED checkpoint: exit code {code}", flush=True)
        return
    yield json.loads(out.read_text())


def measure(request: Found) -> Found:
    import torch

    from prl.config.bench import BenchConfig
    from prl_trainer_fsdp.bench.data import denominators, synthetic_rows, with_sampler
    from prl_trainer_fsdp.bench.run import device_name, model_name, model_table, versions
    from prl_trainer_fsdp.checkpoint import Saver
    from prl_trainer_fsdp.config import FsdpConfig
    from prl_trainer_fsdp.learner import Learner
    from prl_trainer_fsdp.parallel.runtime import start

    folder = Path(request["folder"])
    config = BenchConfig.model_validate(request["config"])
    runtime = start(config)
    own = cast(FsdpConfig, config.trainer.plugin_config())
    learner = Learner(model_table(config, runtime, folder), own, config.loss.build(), runtime)
    rows = [
        with_sampler(row, learner.score, (0,)) for row in synthetic_rows(config.bench, learner.model.vocab_size, (0,))
    ]
    whole = denominators(rows, 1)

    def wait() -> None:
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()

    def step() -> float:
        return clocked(lambda: learner.step(rows, whole, 0), wait)

    for _ in range(3):
        step()
    alone = [step() for _ in range(config.bench.steps)]
    saver = Saver(learner)
    first = saver.take({"step": 0})
    print(f"first snapshot: {first:.3f} s", flush=True)
    snapshots = [saver.take({"step": 0}) for _ in range(3)]
    write = clocked(lambda: saver.write(folder / "waited"), wait)
    print(f"snapshots {snapshots}, files {write:.3f} s", flush=True)
    began = time.perf_counter()
    blocked = saver.begin({"step": 0}, folder / "beside")
    meanwhile: list[float] = []
    while not saver.written() and len(meanwhile) < MOST_STEPS:
        meanwhile.append(step())
    saver.wait()
    written = time.perf_counter() - began
    return {
        "kind": "checkpoint",
        "model": model_name(config),
        "bytes": sum(file.stat().st_size for file in (folder / "beside").iterdir()),
        "first_snapshot_s": first,
        "snapshot_s": [*snapshots, blocked],
        "waited_s": median(snapshots) + write,
        "beside_s": written,
        "step_s": alone,
        "step_meanwhile_s": meanwhile,
        "hardware": device_name(runtime.device),
        "versions": versions(),
        "date": date.today().isoformat(),
    }


def clocked(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    wait()
    began = time.perf_counter()
    call()
    wait()
    return round(time.perf_counter() - began, 5)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--optimizers", type=lambda text: text.split(","), default=["adamw", "muon"])
    parser.add_argument("--shapes", default="qwen3-0.6b", help="a known name, or tiny")
    parser.add_argument("--tokens", type=int, default=16384, help="of the step's one document")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="limit of each process")
    parser.add_argument("--out", default=str(RESULT))
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}: choose from {', '.join(PARTS)}")
    return options


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--measure"]:
        request = json.loads(Path(argv[1]).read_text())
        faulthandler.dump_traceback_later(request["seconds"] - 5, exit=True)
        Path(request["out"]).write_text(json.dumps(measure(request)))
        return 0
    options = parsed(argv)
    out = Path(options.out)
    rows: list[Found] = []
    parts = {"optimizers": optimizers, "checkpoint": checkpoint}
    with tempfile.TemporaryDirectory(prefix="prl-costs-") as folder:
        for part in options.parts:
            for row in parts[part](options, Path(folder)):
                rows.append(row)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(rows, indent=1) + "\n")
    expected = sum({"optimizers": len(options.optimizers), "checkpoint": 1}[part] for part in options.parts)
    return 0 if len(rows) == expected else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
