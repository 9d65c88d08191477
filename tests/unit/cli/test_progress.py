"""Plain lines and the live panel, from the files a run writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from prl.plan import LaunchState, ProcessState
from prl.rundir import RunDir
from prl_cli import progress
from prl_cli.tail import JsonLines

RUNNING = LaunchState("running", [ProcessState("engine", 0, 1, "running")])
STATUS = {
    "state": "running",
    "step": 3,
    "steps": 10,
    "reward": 0.25,
    "tokens_per_s": 5321.7,
    "staleness_mean": 1.25,
    "staleness_max": 3,
    "engine_busy": 0.5,
    "trainer_busy": 0.75,
    "eval_last": 0.5,
    "waiting_for": "engine: rollouts",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "first")


def write(run: RunDir, **status: object) -> None:
    run.path.mkdir(exist_ok=True)
    run.status.write_text(json.dumps({**STATUS, **status}))


def test_a_plain_line_holds_everything() -> None:
    assert progress.plain_line(dict(STATUS), RUNNING) == (
        "step 3/10  reward 0.250  eval 0.500  5,322 tokens/s  staleness 1.2 (max 3)  engine 50%  trainer 75%  "
        "waits for engine: rollouts"
    )


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ({"wanted": 1, "registered": 1, "serving": 1}, ""),
        ({"wanted": 3, "registered": 3, "serving": 3}, "3 engines"),
        ({"wanted": 3, "registered": 2, "serving": 1}, "1 of 3 engines"),
        ({"wanted": 1, "registered": 1, "serving": 0}, "0 of 1 engines"),
    ],
)
def test_how_many_engines_there_are_is_shown_where_it_does_not_go_without_saying(
    counts: dict[str, int], shown: str
) -> None:
    status = {**STATUS, "waits": [], "engines": counts}
    assert progress.engines(status) == shown
    assert (f"  {shown}  " in progress.plain_line(status, RUNNING) + "  ") == bool(shown)
    assert progress.engines({"engines": counts}) == "", "not while it starts"


def test_plain_lines_come_every_two_seconds_and_only_when_something_changed(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    shown = progress.Progress(run, clock=lambda: now)
    for tick in range(120):
        now = tick * 0.25
        if tick < 80:
            write(run, step=tick // 2)
        shown.on_tick(RUNNING)
    write(run, step=99, state="completed")
    shown.on_tick(LaunchState("ended", []))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert len(lines) == 10 + 1 + 1  # ten in the first twenty seconds, the last change, the end
    assert lines[-1].startswith("step 99/10  completed")


def test_quiet_says_nothing(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run)
    with progress.Progress(run, quiet=True) as shown:
        shown.on_tick(RUNNING)
    assert capsys.readouterr() == ("", "")


def test_the_live_panel_shows_the_course_of_the_reward(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    screen = io.StringIO()
    make = rich.console.Console
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    monkeypatch.setattr(
        rich.console, "Console", lambda **_: make(file=screen, force_terminal=True, width=100, color_system=None)
    )
    write(run)
    run.metrics.write_text("".join(json.dumps({"step": s, "reward/mean": s / 10}) + "\n" for s in range(1, 4)))
    with progress.Progress(run) as shown:
        shown.on_tick(RUNNING)
    text = screen.getvalue()
    for expected in ("step 3/10", "0.250", "\u2581\u2585\u2588", "5,322 tokens/s", "engine: rollouts", "Ctrl-C"):
        assert expected in text


def test_a_sparkline_spans_its_values() -> None:
    assert progress.sparkline([0.0, 1.0]) == "\u2581\u2588"
    assert len(progress.sparkline([float(value) for value in range(1000)], width=40)) == 40
    assert progress.sparkline([]) == ""


def test_a_growing_file_is_read_once_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert list(lines.new()) == []
    path.write_text('{"a": 1}\n{"a": ')
    assert list(lines.new()) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2}\nnonsense\n{"a": 3}\n')
    assert list(lines.new()) == [{"a": 2}, {"a": 3}]
