"""prl's training step beside its peer's, on the same shapes, documents and device, by the same clock.

The peer (`trainer_peer_worker.py`) is transformers with one torch.compile per decoder layer, FlashAttention 4 and a
chunked head. Precision is the same for both: float32 master weights and AdamW moments, bfloat16 products. Every
measurement is a process of its own, so memory is clean; prl and peer take turns. Rows of the result file are replaced
by those of the same step and kept otherwise, so that a file may be filled in pieces.

    python benchmarks/trainer_peer.py                                  everything, on CUDA
    python benchmarks/trainer_peer.py --cases 16k,mixed --recompute none --seconds 300 --repeats 2
    python benchmarks/trainer_peer.py --cases tiny --device cpu --compile aot_eager --out /tmp/rows.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "h200_trainer.json"
MIXED = (6000, 200, 3000, 1500, 700, 2500, 484, 2000)
TINY = {
    "model_type": "qwen3",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
LEAST_S = 45.0
"""A measurement is not begun with less time left: start, compilation and the steps take so long."""


@dataclass(frozen=True)
class Case:
    """A step, and what of it is measured with which recomputation."""

    shapes: str | dict[str, Any]
    documents: tuple[int, ...]
    prl: tuple[str, ...]
    peer: tuple[str, ...]
    lora: int = 0


CASES = {
    "16k": Case("qwen3-0.6b", (16384,), ("none", "full", "selective"), ("none", "full")),
    "mixed": Case("qwen3-0.6b", MIXED, ("none", "full", "selective"), ("none", "full")),
    "64k": Case("qwen3-0.6b", (65536,), ("selective",), ("none", "full")),
    "4b-lora": Case("qwen3-4b", (16384,), ("selective", "none", "full"), (), lora=16),
    "tiny": Case(TINY, (40, 24), ("none",), ("none", "full")),
}
DEFAULT = ("16k", "mixed", "64k", "4b-lora")


@dataclass(frozen=True)
class Job:
    side: str
    name: str
    case: Case
    recompute: str


def jobs(options: argparse.Namespace) -> list[Job]:
    """In the order they are measured: prl and peer in turns, then everything once more for every repeat."""
    found = []
    for _ in range(options.repeats):
        for name in options.cases:
            case = CASES[name]
            for recompute in ("none", "selective", "full"):
                for side in ("prl", "peer"):
                    if recompute in getattr(case, side) and side in options.sides and recompute in options.recompute:
                        found.append(Job(side, name, case, recompute))
    return found


def request(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """A `BenchConfig`."""
    trainer: dict[str, Any] = {"use": "fsdp", "device": options.device, "recompute": job.recompute}
    if options.device == "cpu":
        trainer["threads"] = 1
    if job.case.lora:
        trainer["lora"] = {"rank": job.case.lora, "alpha": 2.0 * job.case.lora}
    if job.side == "prl":
        trainer |= options.trainer
    return {
        "model": {"dtype": "bfloat16"},
        "trainer": trainer,
        "bench": {
            "shapes": job.case.shapes,
            "documents": job.case.documents,
            "steps": options.steps,
            "warmup": options.warmup,
        },
    }


def measure(job: Job, options: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, Any] | None:
    """One row; None where the process failed or took too long, which it has said."""
    place = folder / job.name  # models of random weights are made once for every case
    place.mkdir(exist_ok=True)
    asked, answer = place / "request.json", place / "rows.json"
    asked.write_text(json.dumps(request(job, options)))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "prl_trainer_fsdp.bench", str(asked)]
    if job.side == "peer":
        command = [sys.executable, str(HERE / "trainer_peer_worker.py"), str(asked), options.compile, options.precision]
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
        command.append(str(options.profile / f"{job.name}-{job.recompute}-{job.side}.txt"))
    try:
        code = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"SKIPPED {describe(job)}: more than {limit_s:.0f} s", flush=True)
        return None
    if code or not answer.exists():
        print(f"FAILED {describe(job)}: exit code {code}", flush=True)
        return None
    (row,) = json.loads(answer.read_text())
    return {"case": job.name, **row}


def describe(job: Job) -> str:
    return f"{job.side} {job.name} recompute={job.recompute}"


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("trainer", "case", "recompute", "hardware", "world", "precision"))


def merge(former: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = {identity(row) for row in found}
    return [row for row in former if identity(row) not in measured] + list(found)


def write(rows: list[dict[str, Any]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".tmp")
    beside.write_text(json.dumps(rows, indent=1) + "\n")
    beside.replace(file)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=words, default=list(DEFAULT), help=f"of {', '.join(CASES)}")
    parser.add_argument("--sides", type=words, default=["prl", "peer"])
    parser.add_argument("--recompute", type=words, default=["none", "selective", "full"])
    parser.add_argument("--repeats", type=int, default=1, help="2 measures A B A B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing that would end later")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--compile", default="inductor", help="the peer's backend of torch.compile; none leaves it out")
    parser.add_argument("--precision", choices=["masters", "bfloat16"], default="masters", help="the peer's")
    parser.add_argument("--trainer", type=json.loads, default={}, help="more keys of prl's [trainer], as JSON")
    parser.add_argument("--profile", type=Path, help="a folder for profiles")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown cases {sorted(unknown)}: choose from {', '.join(CASES)}")
    return options


def main(argv: Sequence[str]) -> int:
    options = parsed(argv)
    began = time.monotonic()
    former = json.loads(options.out.read_text()) if options.out.exists() else []
    found: list[dict[str, Any]] = []
    missing = 0
    with tempfile.TemporaryDirectory(prefix="prl-peer-") as folder:
        for job in jobs(options):
            left = options.seconds - (time.monotonic() - began)
            if left < min(LEAST_S, options.seconds):
                print(f"SKIPPED {describe(job)}: {left:.0f} s left", flush=True)
                missing += 1
                continue
            row = measure(job, options, Path(folder), left)
            if row is None:
                missing += 1
                continue
            found.append(row)
            write(merge(former, found), options.out)
            print(
                f"{describe(job)}: {row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']} GiB, "
                f"{time.monotonic() - began:.0f} s so far",
                flush=True,
            )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
