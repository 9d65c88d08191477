"""prl plugins: metadata alone unless asked; a broken plugin is told, never fatal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two packages, as far as metadata goes: good and broken plugins, and a name that both claim."""
    for package, points in {
        "good": "[prl.envs]\nfine = good_plugin:FINE\nrival = good_plugin:FINE\n[prl.losses]\nfine = good_plugin:FINE",
        "bad": "[prl.envs]\nraises = bad_plugin:X\nrival = bad_plugin:X\nold = good_plugin:OLD\n",
    }.items():
        info = tmp_path / f"prl_{package}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: prl-{package}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(points)
    (tmp_path / "good_plugin.py").write_text(
        "from prl.contribution import Contribution, PluginConfig\n"
        "class Config(PluginConfig):\n"
        "    size: int = 1\n"
        '    """How large."""\n'
        "FINE = Contribution(factory='good_plugin:make', config=Config, summary='does well')\n"
        "OLD = Contribution(factory='good_plugin:make', api_version=0)\n"
        "def make(config): return object()\n"
    )
    (tmp_path / "bad_plugin.py").write_text("raise RuntimeError('no driver')\n")
    return tmp_path


def prl(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "prl_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False, cwd=site)


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {f"{row['kind']}/{row['name']}": row for row in json.loads(done.stdout)["plugins"]}


def test_the_list_imports_no_plugin(site: Path) -> None:
    (site / "good_plugin.py").write_text("raise SystemExit('imported')\n")
    done = prl(site, "plugins", "--json")
    assert done.returncode == 0, done.stderr
    found = rows(done)
    assert (found["envs/fine"]["package"], found["envs/fine"]["version"]) == ("prl-good", "2.0")
    assert found["envs/rival"]["problem"].startswith("also provided by prl-")


def test_verified_the_list_has_summaries_and_reasons(site: Path) -> None:
    done = prl(site, "plugins", "list", "--verify", "--json")
    assert done.returncode == 0
    found = rows(done)
    assert found["losses/fine"]["summary"] == "does well"
    assert "RuntimeError: no driver" in found["envs/raises"]["problem"]
    assert "version 0 of the plugin interface" in found["envs/old"]["problem"]
    told = prl(site, "plugins", "list", "envs", "--verify").stdout
    assert "BROKEN" in told
    assert "losses" not in told


def test_check_goes_grain_by_grain(site: Path) -> None:
    done = prl(site, "plugins", "check", "losses/fine", "--json")
    answer = json.loads(done.stdout)
    names = [step["name"] for step in answer["steps"]]
    assert names[0] == "declaration"
    assert len(names) > 2  # and the contract of its kind
    broken = prl(site, "plugins", "check", "raises")
    assert broken.returncode == 1
    assert "no driver" in broken.stdout


def test_check_wants_one_plugin(site: Path) -> None:
    several = prl(site, "plugins", "check", "fine")
    assert several.returncode == 2
    assert "--kind" in several.stderr
    assert prl(site, "plugins", "check", "nothing").returncode == 2


def test_the_doctor_is_told_of_every_broken_plugin(site: Path) -> None:
    """Its own process imports torch, too, so only its part about plugins is run here."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    code = "from prl_cli.doctor import probe; probe.plugins()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True
    )
    told = {f"{fact['kind']}/{fact['name']}": fact["problem"] for fact in map(json.loads, done.stdout.splitlines())}
    assert told["envs/fine"] == ""
    assert "RuntimeError: no driver" in told["envs/raises"]
    assert "version 0 of the plugin interface" in told["envs/old"]
    assert "more than one distribution: prl-bad, prl-good" in told["envs/rival"]
