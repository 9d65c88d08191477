"""Turning a checkpoint into a Hugging Face folder, and the weights of such a folder into a checkpoint.

The trainer plugin that wrote the checkpoint knows how to read it: `TrainerPlugin.export` and `import_weights`. They
need torch, so they run in a process of their own, `python -m prl_cli.exporting`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.errors import EnvironmentNotFit, PrlError, UsageError
from prl.rundir import RunDir
from prl_cli import output, runs

if TYPE_CHECKING:
    from prl.config.schema import RunConfig, SftConfig


class ExportFailed(PrlError):
    """The trainer plugin could not do it; the message gives its reason, `code` is its own."""

    def __init__(self, message: str, code: int = PrlError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = code if code in (UsageError.exit_code, EnvironmentNotFit.exit_code) else PrlError.exit_code


def export(run: RunDir, step: int | None, out: Path, *, dtype: str = "", adapter: bool = False) -> int:
    """Write the checkpoint of `step`, or the last one, into `out`. Returns its step.

    Args:
        dtype: of the weights; "" for the run's own. adapter: low-rank adapters alone, in PEFT's format.

    Raises:
        UsageError: no such checkpoint, or `out` is in use. ExportFailed: the trainer plugin could not write it.
    """
    chosen = chosen_step(run, step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: name another")
    request = {"action": "export", "run": str(run.path), "step": chosen, "out": str(out.resolve())}
    _ask(
        request | {"dtype": dtype, "adapter": adapter},
        f"the checkpoint of step {chosen} of run {run.name!r}",
        "exported",
    )
    return chosen


def import_weights(run: RunDir, step: int | None, source: str) -> tuple[int, Path]:
    """Make the weights of a folder those of a run's checkpoint of `step`, or of the last one.

    Returns:
        The step, and the folder that has the checkpoints which this one replaces.

    Raises:
        UsageError: no such checkpoint or folder, or the run is going on. ExportFailed: the weights are not those of the
            run's model, or cannot be read or written.
    """
    chosen = chosen_step(run, step)
    if Path(source).exists():
        source = str(Path(source).resolve())
    elif source.startswith((".", "/", "~")):  # what the configuration takes for a folder, not for a name on a hub
        raise UsageError(f"there is no folder {source}")
    with runs.held(run):
        request = {"action": "import", "run": str(run.path), "step": chosen, "source": source}
        aside = _ask(request, source, f"imported into run {run.name!r}")
    return chosen, Path(aside)


def chosen_step(run: RunDir, step: int | None) -> int:
    """The step asked for, or the last one.

    Raises:
        UsageError: there is no complete checkpoint of it.
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
    return chosen


def _ask(request: dict[str, Any], what: str, doing: str) -> str:
    """Have it done in a process that may import torch; the last line of its output."""
    command = [sys.executable, "-m", "prl_cli.exporting", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise ExportFailed(f"{what} could not be {doing}: {reason}", done.returncode)
    return next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")


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


def _main(request: dict[str, Any]) -> int:
    """The process that does it; its last line on standard error is the reason of a failure."""
    run, step = RunDir(request["run"]), int(request["step"])
    try:
        trainer = stored_config(run).trainer.build()
        if request["action"] == "import":
            print(_import(trainer, run, step, request["source"]))
        elif not hasattr(trainer, "export"):
            raise UsageError("its trainer plugin cannot export checkpoints")
        else:
            trainer.export(run, step, Path(request["out"]), dtype=request["dtype"], adapter=request["adapter"])
    except PrlError as error:
        output.say(" ".join(str(error).split()))
        return error.exit_code
    return 0


def _import(trainer: Any, run: RunDir, step: int, source: str) -> Path:
    """Returns the folder of the checkpoints that were replaced."""
    from prl.store import Checkpoints

    if not hasattr(trainer, "import_weights"):
        raise UsageError("its trainer plugin cannot import weights")
    checkpoints = Checkpoints(run)
    draft = checkpoints.begin(step)
    try:
        files = trainer.import_weights(run, step, source, draft / "trainer")
        return checkpoints.replace_part(step, "trainer", files)[1]
    except BaseException:
        checkpoints.abandon(step)
        raise


if __name__ == "__main__":
    sys.exit(_main(json.loads(sys.argv[1])))
