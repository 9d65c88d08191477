"""A correction that comes into force in the middle of a real run, on ranks that share rows, and stays in force."""

from __future__ import annotations

import pytest

from .harness import Project, Run

pytestmark = pytest.mark.slow


def test_a_correction_comes_into_force_and_a_resumed_run_goes_on_with_it(project: Project) -> None:
    """The limit is below what rounding brings. 256 tokens make a verdict: some of these short steps."""
    settings = ("--set", "trainer.processes=2", "--set", "trainer.cp=2", "--set", "mismatch.max_kl=1e-30")
    settings += ("--set", "mismatch.action=correct", "--set", "mismatch.correction=truncate")
    run = project.run(steps=8).complete(*settings)
    (event,) = run.events("correction")
    assert 3 <= event["step"] <= 6 and event["clip"] == 2.0 and "past mismatch.max_kl = 1e-30" in event["reason"]
    assert corrected(run) == list(range(event["step"] + 1, 9))
    run.complete("--resume", *settings, "--set", "loop.steps=10")
    assert corrected(run) == list(range(event["step"] + 1, 11)) and len(run.events("correction")) == 1
    last = [row for row in run.metrics() if "time/step" in row][-1]
    assert last["correction/share"] == 0 and last["correction/weight"] == 1, "rounding is within the band"
    assert 0 < last["mismatch/kl"] < 1e-6 and last["correction/ratio_max"] < 1.001


def corrected(run: Run) -> list[int]:
    return [row["step"] for row in run.metrics() if "correction/share" in row]
