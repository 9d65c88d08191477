"""prl config show, explain and check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def test_show_prints_values_and_where_they_come_from(project: Path, prl: Any) -> None:
    shown = prl("config", "show", "run.toml", "--set", "seed=7").stdout
    assert [line.split() for line in shown.splitlines() if line.startswith(("seed", "loop.steps"))] == [
        ["seed", "=", "7", "#", "--set", "seed=7"],
        ["loop.steps", "=", "3", "#", "run.toml:6:9"],
    ]
    answer = json.loads(prl("config", "show", "run.toml", "--json").stdout)
    assert answer["config"]["loop"]["max_staleness"] == 4
    assert answer["origins"]["loop.steps"] == "run.toml:6:9"


def test_show_can_leave_defaults_out(project: Path, prl: Any) -> None:
    shown = prl("config", "show", "run.toml", "--changed").stdout
    assert "loop.steps" in shown
    assert "loop.max_staleness" not in shown


def test_explain_a_key_and_its_value(project: Path, prl: Any) -> None:
    told = prl("config", "explain", "loop.steps", "run.toml").stdout
    assert "trains policy version" in told
    assert "run.toml:6:9" in told
    assert "max_staleness" in prl("config", "explain", "loop").stdout
    assert "loop" in prl("config", "explain").stdout
    assert "trains policy version" in json.loads(prl("config", "explain", "loop.steps", "--json").stdout)["text"]


def test_explain_an_unknown_key_names_the_nearest(project: Path, prl: Any) -> None:
    result = prl("config", "explain", "loop.step")
    assert result.exit_code == 2
    assert "steps" in result.stderr


def test_check(project: Path, prl: Any) -> None:
    assert prl("config", "check", "run.toml").stdout == "run.toml: ok\n"
    assert json.loads(prl("config", "check", "run.toml", "--json").stdout)["ok"] is True


def test_check_tells_every_problem(project: Path, prl: Any) -> None:
    sets = ["--set", "loop.stepz=1", "--set", "seed=x"]
    result = prl("config", "check", "run.toml", *sets)
    assert result.exit_code == 2
    assert "(2 problems)" in result.stderr
    answer = json.loads(prl("config", "check", "run.toml", *sets, "--json").stdout)
    assert (answer["ok"], len(answer["problems"])) == (False, 2)
    missing = prl("config", "check", "nowhere.toml")
    assert missing.exit_code == 2
    assert "nowhere.toml" in missing.stderr
