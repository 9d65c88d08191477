"""A project folder whose engine, trainer, environment and launcher are names in a file: nothing heavy is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

PARTS = '''
import hashlib, json, os, pathlib
from prl.plan import LaunchState, ProcessState, Role

class Engine:
    def role(self, config): return Role("engine", ("true",))
    def connect(self, address, token): raise NotImplementedError

class Trainer:
    def role(self, config): return Role("trainer", ("true",))
    def export(self, run_dir, step, out, *, dtype="", adapter=False):
        out.mkdir()
        (out / "config.json").write_text(json.dumps({"step": step, "dtype": dtype, "adapter": adapter}))
    def import_weights(self, run_dir, step, source, out):
        if source == "other":
            from prl.errors import UsageError
            raise UsageError("'w' is [2] there, [3] in the run")
        out.mkdir()
        (out / "weights").write_text(source)
        return {"weights": hashlib.sha256(source.encode()).hexdigest()}

class Env:
    def tasks(self, split): return []
    async def run(self, task, ctx): raise NotImplementedError

class Launcher:
    """Does what a run would leave behind: status, metrics, summary; its exit code is its setting."""
    def __init__(self, code: int = 0, fail: str = ""):
        self.code, self.fail = code, fail

    def check(self, plan):
        if self.fail == "no gpu":
            from prl.errors import EnvironmentNotFit
            raise EnvironmentNotFit("there is no GPU for engine-0")

    def run(self, plan, run_dir, on_tick=None):
        if self.fail == "crash":
            raise RuntimeError("a defect")
        config = json.loads(run_dir.config.read_text())
        steps = config.get("loop", config.get("data"))["steps"]
        state = LaunchState("running", [ProcessState("controller", 0, 1, "running")])
        for step in range(1, steps + 1):
            status = {"state": "running", "step": step, "steps": steps, "version": step, "reward": step / steps,
                      "tokens_per_s": 1234.5, "staleness_mean": 0.5, "staleness_max": 2, "waiting_for": "rollouts"}
            if self.fail:
                status |= {"failed_reason": self.fail, "log": "logs/trainer-0.log"}
            run_dir.status.write_text(json.dumps(status))
            on_tick(state)
        on_tick(LaunchState("ended", []))
        run_dir.summary.write_text(json.dumps({
            "outcome": "failed" if self.code else "completed", "steps": steps, "seconds": 75.0, "eval_first": 0.25,
            "eval_last": 0.875, "tokens_trained": 12000, "tokens_generated": 15000,
            "rollouts": {"dispatched": 64, "trained": 60, "dropped": {"no_signal": 2, "stale": 1}, "failed": {},
                         "pending": 1},
            "staleness": {"mean": 1.25, "max": 4}, "engine_busy": 0.5, "trainer_busy": 0.75}))
        return self.code
'''

CONFIG = """
name = "first"
[model]
path = "tiny/model"
[loop]
steps = 3
[[envs]]
use = "./parts.py:Env"
[engine]
use = "./parts.py:Engine"
[trainer]
use = "./parts.py:Trainer"
[launcher]
use = "./parts.py:Launcher"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with run.toml; runs go to runs/ below it."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRL_DEBUG", raising=False)
    monkeypatch.delenv("PRL_RUNS_DIR", raising=False)
    return tmp_path


@pytest.fixture
def prl() -> Callable[..., Any]:
    """`prl("runs", "--json")` invokes the command in this process and returns typer's result."""
    from prl_cli.main import app

    return lambda *arguments, **more: CliRunner().invoke(app, [str(a) for a in arguments], **more)
