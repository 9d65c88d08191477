"""What asynchrony gains where generation and training have a device each.

    python benchmarks/overlap.py            both parts, results in benchmarks/results/overlap.json
    python benchmarks/overlap.py fakes      the production loop over a fake engine and a fake trainer of equal step time
    python benchmarks/overlap.py real       engine and trainer processes, one thread and one core each

Fakes: an engine with 64 slots, each episode in one for a quarter of the step time, so that a batch of 256 takes the
step time however many are waiting; a trainer that sleeps as long. On real time, the loop's own work included.
Expected: K = 1 at least 1.7 and K = 4 at least 1.8 times as fast as K = 0.

Real: the same model and task with K = 0 and K = 4 (see overlap_real.py). With step times e and t the best is
(e + t) / max(e, t) = 1 + min / max; expected: at least 85% of it.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from prl.loop.supervisor import Loop
from prl.messages import EpisodeRequest
from prl.testing.fakes import FakeFleet, FakeRunner, FakeTrainer, fake_config, fake_state
from prl.types import Outcome

RESULTS = Path(__file__).resolve().parent / "results" / "overlap.json"
GROUPS, GROUP_SIZE, SLOTS = 32, 8, 64
STEP_S = 0.2
STEPS, SKIPPED = 24, 4
TARGETS = {1: 1.7, 4: 1.8}


class SlottedRunner(FakeRunner):
    """An engine of fixed throughput: `SLOTS` episodes at once, the others wait, and none is faster for being alone."""

    def __init__(self, fleet: FakeFleet) -> None:
        super().__init__(fleet, seconds=lambda request: STEP_S * SLOTS / (GROUPS * GROUP_SIZE), chunks=2)
        self._slots = asyncio.Semaphore(SLOTS)
        self.busy_s = 0.0

    async def run(self, request: EpisodeRequest) -> Outcome:
        async with self._slots:
            started = time.perf_counter()
            try:
                return await super().run(request)
            finally:
                self.busy_s += (time.perf_counter() - started) / SLOTS


async def fake_run(max_staleness: int) -> dict[str, float]:
    """Seconds per step after the first `SKIPPED`, and busy fractions of the whole run."""
    config = fake_config(steps=STEPS, groups_per_step=GROUPS, group_size=GROUP_SIZE, max_staleness=max_staleness)
    fleet = FakeFleet()
    runner = SlottedRunner(fleet)
    state = fake_state(config, runner=runner, trainer=FakeTrainer(lambda: STEP_S, keep=False), fleet=fleet)

    async def save(step: int, data: bytes) -> None:
        return None

    started = time.perf_counter()
    await Loop(state, save).run()
    wall = time.perf_counter() - started
    steps = [values["time/step"] for _, values in state.sink.lines if "time/step" in values][SKIPPED:]  # type: ignore[attr-defined]
    return {
        "step_s": sum(steps) / len(steps),
        "engine_busy": runner.busy_s / wall,
        "trainer_busy": STEPS * STEP_S / wall,
        "staleness_max": state.staleness_max,
    }


def fakes() -> dict[str, Any]:
    found = {k: asyncio.run(fake_run(k)) for k in (0, 1, 4)}
    print(f"fake engine and trainer, {STEP_S * 1e3:.0f} ms each, {GROUPS} x {GROUP_SIZE} episodes a step")
    for k, result in found.items():
        speed_up = found[0]["step_s"] / result["step_s"]
        result["speed_up"] = speed_up
        print(
            f"  K={k}: {result['step_s'] * 1e3:6.1f} ms a step, {speed_up:.2f} times K=0; busy: "
            f"engine {result['engine_busy']:.0%}, trainer {result['trainer_busy']:.0%}; "
            f"staleness at most {result['staleness_max']}"
        )
    passed = all(found[k]["speed_up"] >= target for k, target in TARGETS.items())
    return {"step_s": STEP_S, "runs": {str(k): v for k, v in found.items()}, "targets": TARGETS, "passed": passed}


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else "all"
    if part not in ("all", "fakes", "real"):
        sys.exit(f"unknown part {part!r}: fakes, real, or nothing for both")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    if part in ("all", "fakes"):
        results["fakes"] = fakes()
    if part in ("all", "real"):
        from overlap_real import real

        results["real"] = real()
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    failed = [name for name in ("fakes", "real") if name in results and not results[name]["passed"]]
    if failed:
        sys.exit(f"below the target: {', '.join(failed)}")


if __name__ == "__main__":
    main()
