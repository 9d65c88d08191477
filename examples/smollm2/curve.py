"""The learning curve of a run of this example as Markdown: `python examples/smollm2/curve.py runs/smollm2`.

Rows are windows of steps: means of rewards and of what is met; the largest mismatch KL, of training and of the probes
that engines scored when they installed the step's version. Evaluations stand in the row in whose window their step
falls.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ENV = "env/instruction_following/"
PROBES = "mismatch/probe_"
KLS = ("mismatch/kl", f"{PROBES}kl")


def read(run: Path) -> tuple[list[Row], dict[int, float]]:
    """Metrics of every trained step with what was found of its version's probes, and the score of every evaluation by
    its step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = {row["step"]: row["eval/score"] for row in rows if "eval/score" in row}
    probed = {row["step"]: {k: v for k, v in row.items() if k.startswith(PROBES)} for row in rows if KLS[1] in row}
    return [row | probed.get(row["step"], {}) for row in rows if "time/step" in row], scores


def mean(rows: list[Row], key: str) -> float | None:
    found = [row[key] for row in rows if key in row]
    return statistics.fmean(found) if found else None


def table(steps: list[Row], scores: dict[int, float], window: int) -> list[str]:
    kinds = sorted({key.removeprefix(f"{ENV}met/") for row in steps for key in row if key.startswith(f"{ENV}met/")})
    names = ["steps", "seconds", "reward", "held out, greedy", "tokens", *kinds, "largest mismatch KL", "of the probes"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    started = steps[0]["time"] - steps[0]["time/step"]
    for first in range(0, len(steps), window):
        rows = steps[first : first + window]
        last = rows[-1]["step"]
        # Step 0 is judged before the first step: it stands in the first row, unless that has one of its own.
        judged = [scores[step] for step in sorted(scores) if (rows[0]["step"] if first else 0) <= step <= last]
        kls = [[row[name] for row in rows if name in row] for name in KLS]
        values = [
            mean(rows, "reward/mean"),
            " to ".join(f"{score:.2f}" for score in ([judged[0], judged[-1]] if len(judged) > 1 else judged)) or None,
            f"{mean(rows, 'rollout/sampled_tokens') or 0:.0f}",
            *(mean(rows, f"{ENV}met/{kind}") for kind in kinds),
            *(f"{max(found):.1e}" if found else None for found in kls),
        ]
        cells = ["-" if v is None else v if isinstance(v, str) else f"{v:.2f}" for v in values]
        lines.append(f"| {rows[0]['step']}-{last} | {rows[-1]['time'] - started:.0f} | " + " | ".join(cells) + " |")
    return lines


def figures(run: Path, steps: list[Row]) -> list[str]:
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    own, probes = ([row[name] for row in steps if name in row] for name in KLS)
    tokens = [row[f"{PROBES}tokens"] for row in steps if KLS[1] in row]
    busy = f"engine {summary['engine_busy']:.0%}, trainer {summary['trainer_busy']:.0%}"
    return [
        f"* {summary['steps']} steps in {steps[-1]['time'] - steps[0]['time']:.0f} s, median "
        f"{statistics.median(row['time/step'] for row in steps):.2f} s; whole run {summary['seconds']:.0f} s",
        f"* {summary['tokens_generated']:,} tokens generated, {summary['tokens_trained']:,} trained; busy: {busy}",
        f"* publishing weights took {statistics.median(row['time/publish'] for row in steps):.2f} s in the median",
        f"* mismatch KL: largest {max(own, default=0):.1e}, median {statistics.median(own or [0]):.1e}, of {len(own)} "
        "steps with tokens of the trainer's own version",
        f"* of the probes: largest {max(probes, default=0):.1e}, median {statistics.median(probes or [0]):.1e}, of "
        f"{len(probes)} steps whose version was installed, over {statistics.median(tokens or [0]):.0f} tokens in the "
        "median",
        f"* held-out reward {summary['eval_first']} before, {summary['eval_last']} after; staleness "
        f"{summary['staleness']['mean']:.2f} in the mean, {summary['staleness']['max']} at most",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--window", type=int, default=20, help="steps of one row")
    args = parser.parse_args()
    steps, scores = read(args.run)
    print("\n".join([*table(steps, scores, args.window), "", *figures(args.run, steps)]))


if __name__ == "__main__":
    main()
