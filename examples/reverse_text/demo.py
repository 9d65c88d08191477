"""The whole example, as `make demo` runs it: prepare, warm up, reinforcement learning, evaluation, a summary.

Every step is a command that can be typed by hand; each is printed before it runs. Exit code 1 when the model did not
learn: at most 0.5 held-out exact match after the warm-up, at least 0.9 at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PRL = str(Path(sys.executable).with_name("prl"))
AFTER_WARM_UP, AT_THE_END = 0.5, 0.9


@dataclass(frozen=True)
class Names:
    """Where one seed's files go, relative to the folder the demo runs in."""

    seed: int

    @property
    def suffix(self) -> str:
        return "" if self.seed == 0 else f"-seed{self.seed}"

    @property
    def build(self) -> str:
        return f"build/reverse_text{self.suffix}"

    @property
    def warm_up(self) -> str:
        return f"reverse-text-warmup{self.suffix}"

    @property
    def run(self) -> str:
        return f"reverse-text{self.suffix}"


def run(folder: Path, *command: str) -> float:
    """Run one step in the foreground and return its seconds; its failure ends the demo with its exit code."""
    print(f"\n$ {' '.join(Path(command[0]).name if i == 0 else part for i, part in enumerate(command))}", flush=True)
    started = time.monotonic()
    code = subprocess.run(command, cwd=folder, check=False).returncode
    if code:
        sys.exit(code if code > 0 else 1)
    return time.monotonic() - started


def settings(names: Names, kind: str) -> list[str]:
    """What differs from the files on disk when another seed is asked for."""
    if names.seed == 0:
        return []
    changes = [f"seed={names.seed}"]
    if kind == "sft":
        changes += [f"name={names.warm_up}", f"model.path={names.build}/model", f"data.train={names.build}/sft.jsonl"]
    else:
        changes += [f"name={names.run}", f"model.path=runs/{names.warm_up}/model"]
    return [part for change in changes for part in ("--set", change)]


def demo(names: Names, folder: Path) -> dict[str, float]:
    """All four steps, in `folder`. Returns the seconds of each."""
    here = os.path.relpath(HERE, folder)
    shutil.rmtree(folder / names.build, ignore_errors=True)
    prepare = (f"{here}/prepare.py", "--out", names.build, "--seed", str(names.seed))
    return {
        "prepare": run(folder, sys.executable, *prepare),
        "warm-up": run(folder, PRL, "sft", f"{here}/sft.toml", *settings(names, "sft"), "--clean", "--yes"),
        "reinforcement learning": run(
            folder, PRL, "run", f"{here}/rl.toml", *settings(names, "rl"), "--clean", "--yes"
        ),
        "evaluation": run(folder, PRL, "eval", names.run),
    }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def time_to(rows: list[dict[str, Any]], target: float) -> tuple[int, float] | None:
    """Step and seconds of training after which an evaluation first reached `target`.

    Training begins at the evaluation of step 0; an evaluation counts when its step was trained, not when it ended.
    """
    start = next((row["time"] for row in rows if row["step"] == 0 and "eval/score" in row), None)
    trained = {row["step"]: row["time"] for row in rows if "time/step" in row}
    for row in rows:
        if row.get("eval/score", 0.0) >= target and start is not None and row["step"] in trained:
            return row["step"], trained[row["step"]] - start
    return None


def summary(names: Names, folder: Path, seconds: dict[str, float]) -> bool:
    """Print what happened; whether the model learned."""
    directory = folder / "runs" / names.run
    result = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    rows = read_metrics(directory / "metrics.jsonl")
    before, after = result["eval_first"], result["eval_last"]
    steps = [row["time/step"] for row in rows if "time/step" in row]
    reached = time_to(rows, AT_THE_END)
    rollouts, staleness = result["rollouts"], result["staleness"]
    print("\nheld-out texts reversed exactly, greedy")
    print(f"  after the warm-up                   {before:.2f}")
    print(f"  after reinforcement learning        {after:.2f}")
    if reached:
        print(f"  {AT_THE_END:g} or more at step {reached[0]:<3}           {reached[1]:.1f} s of training")
    print("\nseconds")
    for name, value in seconds.items():
        print(f"  {name:<24} {value:15.1f}")
    print(f"  {'together':<24} {sum(seconds.values()):15.1f}")
    print("\nreinforcement learning")
    print(f"  steps                               {result['steps']}, median {statistics.median(steps):.3f} s")
    print(f"  tokens trained / generated          {result['tokens_trained']:,} / {result['tokens_generated']:,}")
    print(f"  episodes                            {', '.join(f'{count(v):,} {k}' for k, v in rollouts.items())}")
    print(f"  staleness, in versions              mean {staleness['mean']:.2f}, max {staleness['max']}")
    busy = f"engine {result['engine_busy']:.0%}, trainer {result['trainer_busy']:.0%}"
    print(f"  busy share of the time              {busy}")
    print(f"\nmore: {os.path.relpath(PRL)} runs show {names.run}")
    return bool(before <= AFTER_WARM_UP and after >= AT_THE_END)


def count(value: int | dict[str, int]) -> int:
    return value if isinstance(value, int) else sum(value.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the runs")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where build/ and runs/ are made")
    args = parser.parse_args()
    names, folder = Names(args.seed), args.folder.resolve()
    if not summary(names, folder, demo(names, folder)):
        sys.exit(f"the model did not learn: expected at most {AFTER_WARM_UP} before and at least {AT_THE_END} after")


if __name__ == "__main__":
    main()
