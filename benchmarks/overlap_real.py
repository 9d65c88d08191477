"""The real half of overlap.py: `prl run` with K = 0 and K = 4, engine and trainer pinned to one core each.

An untrained model of a few million parameters answers with as many tokens as it may, so that a step's generation
(step time minus training, with K = 0) and its training (gradient step and weights written) are of similar length.
The other processes share both cores. Between two runs nothing differs but `loop.max_staleness`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "overlap"
PRL = str(Path(sys.executable).with_name("prl"))
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
MAX_TOKENS = 40
STEPS, SKIPPED = 16, 5
TARGET = 0.85

CONFIG = """
name = "overlap"
runs_dir = "{runs}"
[model]
path = "{model}"
[loop]
steps = {steps}
groups_per_step = 32
group_size = 8
[sampling]
max_tokens = {max_tokens}
[[envs]]
use = "{env}:Noise"
[engine]
threads = 1
max_sequence_tokens = 64
[trainer]
threads = 1
lr = 1e-7
[eval]
tasks = 0
[checkpoint]
at_end = false
[store]
rollouts = "none"
"""


def make_model(folder: Path) -> None:
    """The example's tokenizer and a random Llama whose end token is never likely."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sys.path.insert(0, str(ROOT / "examples" / "reverse_text"))
    from prepare import save_tokenizer

    folder.mkdir(parents=True)
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=257,
        pad_token_id=256, **SHAPE,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def pin(process: int, core: int) -> None:
    """Every thread of a process to one core."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), {core})


def pin_roles(status: Path, cores: dict[str, int], started: float, run: subprocess.Popen[bytes]) -> None:
    """Wait until the roles are up and pin them; status.json has their process ids."""
    waiting = dict(cores)
    while waiting and run.poll() is None:
        time.sleep(0.1)
        if not status.exists() or status.stat().st_mtime < started:
            continue
        roles = json.loads(status.read_text()).get("roles", {})
        for label, role in roles.items():
            core = waiting.pop(label.partition("-")[0], None)
            if core is not None:
                pin(role["pid"], core)


def one_run(max_staleness: int, cores: list[int]) -> dict[str, float]:
    """Medians over the steps after the first `SKIPPED`, and busy fractions."""
    directory = BUILD / "runs" / "overlap"
    command = [
        PRL,
        "run",
        str(BUILD / "overlap.toml"),
        "--clean",
        "--yes",
        "--set",
        f"loop.max_staleness={max_staleness}",
    ]
    started = time.time()
    with open(BUILD / "run.log", "wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        pin_roles(directory / "status.json", {"engine": cores[0], "trainer": cores[1]}, started, run)
        if run.wait():
            sys.exit(f"prl run failed: see {BUILD / 'run.log'}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step" in row][SKIPPED:]
    summary = json.loads((directory / "summary.json").read_text())
    return {
        "step_s": statistics.fmean(row["time/step"] for row in rows),
        "train_s": statistics.fmean(row["time/train"] + row["time/publish"] for row in rows),
        "engine_busy": summary["engine_busy"],
        "trainer_busy": summary["trainer_busy"],
        "staleness_max": summary["staleness"]["max"],
    }


def real() -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("the real part needs two cores: engine and trainer have one each")
    shutil.rmtree(BUILD, ignore_errors=True)
    make_model(BUILD / "model")
    (BUILD / "overlap.toml").write_text(
        CONFIG.format(
            runs=BUILD / "runs", model=BUILD / "model", steps=STEPS, max_tokens=MAX_TOKENS,
            env=ROOT / "benchmarks" / "overlap_env.py",
        )
    )  # fmt: skip
    synchronous, overlapped = one_run(0, cores), one_run(4, cores)
    train = synchronous["train_s"]
    generate = synchronous["step_s"] - train
    bound = 1 + min(generate, train) / max(generate, train)
    speed_up = synchronous["step_s"] / overlapped["step_s"]
    print(f"engine and trainer processes, one core each: {generate:.2f} s and {train:.2f} s a step with K=0")
    for name, result in (("K=0", synchronous), ("K=4", overlapped)):
        print(
            f"  {name}: {result['step_s']:.2f} s a step; busy: engine {result['engine_busy']:.0%}, trainer "
            f"{result['trainer_busy']:.0%}; staleness at most {result['staleness_max']}"
        )
    print(f"  {speed_up:.2f} times as fast, at best 1 + min/max = {bound:.2f}: {speed_up / bound:.0%} of it")
    return {
        "runs": {"0": synchronous, "4": overlapped},
        "generate_s": generate, "train_s": train, "speed_up": speed_up, "bound": bound,
        "share_of_bound": speed_up / bound, "target": TARGET, "passed": speed_up / bound >= TARGET,
    }  # fmt: skip


if __name__ == "__main__":
    real()
