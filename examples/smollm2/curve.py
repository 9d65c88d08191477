"""The learning curve of a run of this example as Markdown: `python examples/smollm2/curve.py runs/smollm2`.

A row for every evaluation and every 25th step. What was sampled, reward and length, is the mean of ten steps around
that step, at the ends of fewer; what was held out is that evaluation's; mismatch KLs are the largest since the row
before. A second table says which share of the held-out answers met each kind of constraint, before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
AROUND = range(-4, 6)
MET = "eval/instruction_following/met/"
TRAINED, PROBED = "mismatch/kl", "mismatch/probe_kl"


class Run(NamedTuple):
    steps: dict[int, Row]
    """Metrics of every trained step; `TRAINED` is of those that had tokens of the trainer's own version."""
    judged: dict[int, Row]
    """Metrics of every evaluation by the step before it."""
    probed: dict[int, float]
    """KL of the engine's probes after installing what a step made. Empty where a run has none."""


def read(folder: Path) -> Run:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Run(
        {row["step"]: row for row in rows if "time/step" in row},
        {row["step"]: row for row in rows if "eval/score" in row},
        {row["step"]: row[PROBED] for row in rows if PROBED in row},
    )


def cell(values: Iterable[float], form: str, value: Any = statistics.fmean) -> str:
    found = list(values)
    return f"{value(found):{form}}" if found else "-"


def table(run: Run, every: int) -> list[str]:
    names = ["step", "reward", "held out", "tokens", "mismatch KL", *(["of probes"] if run.probed else [])]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    last, before = max(run.steps), -1
    shown = {*range(0, last + 1, every), *(step for step in run.judged if step <= last), last}
    for step in sorted(shown):
        around = [run.steps[step + by] for by in AROUND if step + by in run.steps]
        since = range(before + 1, step + 1)
        cells = [
            cell((row["reward/mean"] for row in around if "reward/mean" in row), ".2f"),
            f"{run.judged[step]['eval/score']:.2f}" if step in run.judged else "-",
            cell((row["rollout/sampled_tokens"] for row in around if "rollout/sampled_tokens" in row), ".0f"),
            cell((run.steps[i][TRAINED] for i in since if TRAINED in run.steps.get(i, {})), ".1e", max),
            *([cell((run.probed[i] for i in since if i in run.probed), ".1e", max)] if run.probed else []),
        ]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
        before = step
    return lines


def kinds(run: Run) -> list[str]:
    """What held-out answers meet before and after; nothing where there was no evaluation."""
    if not run.judged:
        return []
    shown = sorted({min(run.judged), max(run.judged)})
    lines = ["", "| kind | " + " | ".join(f"step {step}" for step in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for key in sorted(key for key in run.judged[shown[0]] if key.startswith(MET)):
        met = [f"{run.judged[step][key]:.2f}" if key in run.judged[step] else "-" for step in shown]
        lines.append(f"| `{key.removeprefix(MET)}` | " + " | ".join(met) + " |")
    return lines


def figures(folder: Path, run: Run) -> list[str]:
    steps = [run.steps[step] for step in sorted(run.steps)]
    trained = {step: row[TRAINED] for step, row in run.steps.items() if TRAINED in row}
    neither = len(run.steps.keys() - trained.keys() - run.probed.keys())
    lines = [
        "",
        f"* {len(steps)} steps in {steps[-1]['time'] - steps[0]['time'] + steps[0]['time/step']:.0f} s, median "
        f"{statistics.median(row['time/step'] for row in steps):.2f} s; publishing weights took "
        f"{statistics.median(row['time/publish'] for row in steps):.2f} s in the median",
        told(trained, "mismatch KL", "steps that had tokens of the trainer's version"),
        *([told(run.probed, "KL of probes", "installed versions")] if run.probed else []),
        f"* steps with neither: {neither}",
    ]
    path = folder / "summary.json"
    if path.exists():  # of a run that has ended
        summary = json.loads(path.read_text(encoding="utf-8"))
        age = summary["staleness"]
        lines += [
            f"* {summary['outcome']} after {summary['seconds']:.0f} s; {summary['tokens_generated']:,} tokens "
            f"generated, {summary['tokens_trained']:,} trained",
            f"* busy: engine {summary['engine_busy']:.0%}, trainer {summary['trainer_busy']:.0%}; staleness "
            f"{age['mean']:.2f} in the mean, {age['max']} at most",
        ]
    return lines


def told(kls: dict[int, float], name: str, of: str) -> str:
    if not kls:
        return f"* {name}: none, of 0 {of}"
    worst = max(kls, key=lambda step: kls[step])
    median = statistics.median(kls.values())
    return f"* {name}: {kls[worst]:.1e} at most, at step {worst}; median {median:.1e}, of {len(kls)} {of}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--every", type=int, default=25, help="steps between two rows (default: %(default)s)")
    args = parser.parse_args()
    run = read(args.run)
    if not run.steps:
        raise SystemExit(f"{args.run}: no step was trained")
    print("\n".join([*table(run, args.every), *kinds(run), *figures(args.run, run)]))


if __name__ == "__main__":
    main()
