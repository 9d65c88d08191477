"""The recipe of examples/reverse_text under TRL's GRPOTrainer and under prl, one after the other on the same cores.

    make bench-peer        after `make demo`, whose warmed-up model both start from

TRL is installed into an environment of its own, build/peer-venv, so that it never decides which versions prl gets. Both
train on the same texts in groups of 8, 32 groups a step, with the same reward, advantages, learning rates and
optimiser, and are evaluated greedily on the same held-out texts. TRL generates and trains in turn, in one process, with
all cores; prl has engine and trainer in processes of their own, one thread each. The result is recorded in
benchmarks/results/peer_trl.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from prl.config.load import load_config
from prl.config.schema import RunConfig
from prl_envs.reverse_text import ReverseText, ReverseTextConfig

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
RESULTS = Path(__file__).resolve().parent / "results" / "peer_trl.json"
TRL = "trl==1.16.0"
CONFIG = "examples/reverse_text/rl.toml"
RUN = "reverse-text-peer"
TARGET = 0.9


def peer_python() -> str:
    """The interpreter of build/peer-venv, made when it is not there."""
    folder = BUILD / "peer-venv"
    python = folder / "bin" / "python"
    if (
        subprocess.run([python, "-c", "import trl"], check=False, capture_output=True).returncode
        if python.exists()
        else 1
    ):
        print(f"installing {TRL} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", TRL, "torch"], check=True
        )
    return str(python)


def run_trl(config: RunConfig, cores: int) -> dict[str, Any]:
    env = ReverseText(ReverseTextConfig())
    loop, trainer = config.loop, config.trainer.own
    train, held_out = env.tasks("train"), env.tasks("eval")
    tasks = {
        "train": [train[i].data["text"] for i in range(loop.steps * loop.groups_per_step)],
        "eval": [held_out[i].data["text"] for i in range(config.eval.tasks)],
        "steps": loop.steps,
        "lr": trainer["lr"],
        "min_lr_ratio": trainer["min_lr_ratio"],
        "eval_every": config.eval.every,
        "threads": cores,
        "seed": config.seed,
    }
    (BUILD / "peer.json").write_text(json.dumps(tasks))
    out = BUILD / "peer-result.json"
    command = [peer_python(), "benchmarks/peer_trl_worker.py", config.model.path, str(BUILD / "peer.json"), str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(out.read_text())
    return report("TRL", result["step_s"], [tuple(row) for row in result["evals"]])


def run_prl() -> dict[str, Any]:
    prl = str(Path(sys.executable).with_name("prl"))
    subprocess.run([prl, "run", CONFIG, "--set", f"name={RUN}", "--clean", "--yes"], cwd=ROOT, check=True)
    lines = (ROOT / "runs" / RUN / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    start = next(row["time"] for row in rows if row["step"] == 0 and "eval/score" in row)
    trained = {0: 0.0, **{row["step"]: row["time"] - start for row in rows if "time/step" in row}}
    evals = [(row["step"], trained[row["step"]], row["eval/score"]) for row in rows if "eval/score" in row]
    return report("prl", [row["time/step"] for row in rows if "time/step" in row], evals)


def report(name: str, step_s: list[float], evals: list[tuple[int, float, float]]) -> dict[str, Any]:
    """`evals`: (step, seconds of training, exact match)."""
    reached = next(((step, seconds) for step, seconds, score in evals if score >= TARGET), None)
    return {
        "name": name,
        "median_step_s": statistics.median(step_s),
        "mean_step_s": statistics.fmean(step_s),
        "first": evals[0][2],
        "last": evals[-1][2],
        "steps_to_target": reached[0] if reached else None,
        "seconds_to_target": reached[1] if reached else None,
        "evals": evals,
    }


def main() -> None:
    os.chdir(ROOT)
    config = load_config([CONFIG], schema=RunConfig, checks=False).config
    if not Path(config.model.path).is_dir():
        sys.exit(f"{config.model.path} is missing: `make demo` makes it")
    cores = len(os.sched_getaffinity(0))
    results = [run_trl(config, cores), run_prl()]
    loop = config.loop
    print(f"\n{cores} cores, {loop.groups_per_step} x {loop.group_size} completions a step, {loop.steps} steps")
    for result in results:
        to = result["seconds_to_target"]
        when = "never" if to is None else f"after {result['steps_to_target']} steps, {to:.1f} s"
        print(
            f"  {result['name']}: step {result['median_step_s']:.3f} s (median), {result['mean_step_s']:.3f} s (mean); "
            f"exact match {result['first']:.2f} -> {result['last']:.2f}; {TARGET:g} {when}"
        )
    RESULTS.write_text(json.dumps({"cores": cores, "trl": TRL, "target": TARGET, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
