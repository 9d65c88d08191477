"""Real runs of a tiny model through the `prl` command, and what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prl.rundir import RunDir

PATIENCE_S = 240.0
"""How long anything may take before a test gives up; a quiet machine starts a run in 7 s, a busy one in a minute."""

SECRET = "SOME_SERVICE_API_KEY"
"""A variable of the shell that starts the runs, such as an environment must not see."""

CONFIG = """\
name = "{name}"
seed = 3

[model]
path = "{model}"

[loop]
steps = {steps}
groups_per_step = 4
group_size = 4
max_staleness = {staleness}

[sampling]
max_tokens = 6

[[envs]]
use = "./my_env.py:MyEnv"
marks = "{folder}"

[engine]
threads = 1
slots = 16
prefill_rows = 8

[trainer]
threads = 1
lr = 1e-2

[eval]
every = 2
tasks = 8

[checkpoint]
every = 2
keep = 3
"""


class Project:
    """A folder with a configuration and an environment in a file, where runs are started."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "my_env.py").write_text((Path(__file__).with_name("my_env.py")).read_text())

    def run(self, name: str = "run", *, steps: int = 6, staleness: int = 0, more: str = "") -> Run:
        """Write the configuration of a run. `more` is TOML that is appended."""
        path = self.folder / f"{name}.toml"
        text = CONFIG.format(
            name=name, model=self.model, steps=steps, staleness=staleness, folder=self.folder.absolute()
        )
        path.write_text(text + more)
        return Run(self, name, path)

    def prl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `prl` to its end."""
        return subprocess.run(
            _command(*arguments),
            cwd=self.folder,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )


class Run:
    """One run of a project."""

    def __init__(self, project: Project, name: str, config: Path) -> None:
        self.project = project
        self.name = name
        self.config = config
        self.dir = RunDir(project.folder / "runs" / name)

    def finish(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`prl run`, to its end."""
        return self.project.prl("run", str(self.config), *arguments)

    def complete(self, *arguments: str) -> Run:
        """`prl run`, to its end, which must be a good one."""
        done = self.finish(*arguments)
        assert done.returncode == 0, self.told(done)
        return self

    def going(self, *arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """`prl run` in the background; nothing of it is left when the block ends."""
        return self.started("run", str(self.config), *arguments)

    @contextlib.contextmanager
    def started(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """`prl` with this command, in the background; nothing of it is left when the block ends."""
        output = self.project.folder / f"{self.name}.out"
        with output.open("a") as file:
            process = subprocess.Popen(
                _command(*command),
                cwd=self.project.folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
            wait_until(lambda: not self.alive(), "every process of the run has ended")

    def told(self, done: subprocess.CompletedProcess[str]) -> str:
        logs = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.dir.logs.glob("*.log"))]
        return "\n".join([f"exit code {done.returncode}", done.stdout, done.stderr, *logs])

    # --- while it goes on ---------------------------------------------------------------------------------

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        """Until a step was trained. Steps that an earlier start had trained count only once they are there again."""
        wait_until(lambda: self.trained_steps() >= step or process.poll() is not None, f"step {step} is trained")
        assert self.trained_steps() >= step, f"the run ended before step {step}: {self.output()}"

    def trained_steps(self) -> int:
        return max((row["step"] for row in self.metrics() if "time/step" in row), default=0)

    def pid(self, role: str) -> int:
        """Of a running process, such as "engine-0"."""
        return int((self.dir.control / "pids" / role).read_text())

    def kill(self, role: str) -> bool:
        """Whether it was there to be killed: a run may end before."""
        try:
            os.kill(self.pid(role), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return True

    def alive(self) -> list[int]:
        """Pids of every process, launcher and `prl` included, that works in this run's directory."""
        mark = str(self.dir.path).encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (folder / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def ask(self, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.project.prl(action, self.name, *arguments)

    def output(self) -> str:
        path = self.project.folder / f"{self.name}.out"
        return path.read_text() if path.exists() else ""

    # --- what it leaves -----------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl."""
        if not self.dir.metrics.exists():
            return []
        return [json.loads(line) for line in self.dir.metrics.read_bytes().split(b"\n")[:-1]]

    def computed(self) -> list[dict[str, Any]]:
        """The metrics without what a clock says, and without how loaded the engines were at that moment."""
        return [
            {
                key: value
                for key, value in row.items()
                if not key.startswith(("time", "engine/")) and key != "eval/seconds"
            }
            for row in self.metrics()
        ]

    def events(self, kind: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.dir.events.read_bytes().split(b"\n")[:-1]]
        return [row for row in rows if row["kind"] == kind]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.dir.summary.read_text()))

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.dir.status.read_text()))

    def log(self, role: str) -> str:
        return (self.dir.logs / f"{role}.log").read_text()

    def steps_saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.dir.checkpoints.glob("step_??????"))

    def weights(self, step: int) -> dict[str, bytes]:
        """The trainer's tensors of a checkpoint, as bytes: parameters and moments, and what the files say of them."""
        part = self.dir.checkpoint(step) / "trainer"
        return {file.name: file.read_bytes() for file in sorted(part.glob("rank-*.safetensors"))}


def assert_adds_up(counts: Mapping[str, Any]) -> None:
    """dispatched == trained + dropped + failed + pending."""
    ended = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["failed"].values())
    assert counts["dispatched"] == ended + counts["pending"], counts
    assert min(counts["trained"], counts["pending"]) >= 0


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prl_cli", *arguments]


def _environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_COLOR": "1",
        SECRET: "x",
    }
