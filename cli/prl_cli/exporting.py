"""Turning a checkpoint into a Hugging Face folder.

The trainer plugin that wrote the checkpoint knows how to read it: `TrainerPlugin.export(run_dir, step, out)`. It needs
torch, so it runs in a process of its own, `python -m prl_cli.exporting RUN_DIR STEP OUT`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from prl.errors import PrlError, UsageError
from prl.rundir import RunDir
from prl_cli import output, runs

if TYPE_CHECKING:
    from prl.config.schema import RunConfig, SftConfig


class ExportFailed(PrlError):
    """The trainer plugin could not write the folder; the message gives its reason."""


def export(run: RunDir, step: int | None, out: Path) -> int:
    """Write the checkpoint of `step`, or the last one, into `out`. Returns its step.

    Raises:
        UsageError: no such checkpoint, or `out` is in use. ExportFailed: the trainer plugin could not write it.
    """
    steps = runs.checkpoint_steps(run)
    if not steps:
        raise UsageError(
            f"run {run.name!r} has no complete checkpoint: `prl checkpoint {run.name}` makes one while it runs"
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise UsageError(
            f"run {run.name!r} has no complete checkpoint of step {chosen}; it has {', '.join(map(str, steps))}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: name another")
    command = [sys.executable, "-m", "prl_cli.exporting", str(run.path), str(chosen), str(out.resolve())]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise ExportFailed(f"the checkpoint of step {chosen} of run {run.name!r} could not be exported: {reason}")
    return chosen


def exported(run: RunDir, step: int | None) -> Path:
    """The checkpoint of `step`, or the last one, in `exports/` of its run; what is already there is not made again.

    Raises:
        UsageError: no such checkpoint. ExportFailed: it could not be exported.
    """
    steps = runs.checkpoint_steps(run)
    chosen = steps[-1] if step is None and steps else step
    folder = run.path / "exports" / f"step_{chosen or 0:06d}"
    if chosen in steps and folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as place:
        export(run, chosen, Path(place) / "model")
        (Path(place) / "model").rename(folder)
    return folder


def stored_config(run: RunDir) -> RunConfig | SftConfig:
    """The configuration a run was started with.

    Raises:
        ConfigError: it is not what this release of prl writes.
    """
    from prl.config.load import read_resolved
    from prl.config.schema import RunConfig, SftConfig

    if "envs" in runs.read_json(run.config):
        return read_resolved(run.config, RunConfig)
    return read_resolved(run.config, SftConfig)


def _main(run_dir: str, step: str, out: str) -> int:
    """The process that does it; its last line on standard error is the reason of a failure."""
    run = RunDir(run_dir)
    try:
        trainer = stored_config(run).trainer.build()
        if not hasattr(trainer, "export"):
            raise UsageError("its trainer plugin cannot export checkpoints")
        trainer.export(run, int(step), Path(out))
    except PrlError as error:
        output.say(" ".join(str(error).split()))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
