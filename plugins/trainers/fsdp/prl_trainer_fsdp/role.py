"""The trainer's part of a run's plan. Imports nothing heavy: it runs in the command line's process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prl.config.bench import BenchConfig
from prl.config.schema import ModelTable, RunConfig, SftConfig
from prl.plan import TRAINER, Resources, Role
from prl.rundir import RunDir
from prl_trainer_fsdp.config import FsdpConfig


class FsdpPlugin:
    def __init__(self, config: FsdpConfig) -> None:
        self.config = config

    def role(self, config: RunConfig | SftConfig) -> Role:
        """One process, or a group of `trainer.processes` of them; each registers as its own replica.

        Raises:
            ConfigError: so many processes cannot be laid out as the configuration says.
        """
        self.config.layout(config.trainer.processes)
        module = "prl_trainer_fsdp.sft" if isinstance(config, SftConfig) else "prl_trainer_fsdp"
        gpus = 0 if self.config.device == "cpu" else config.trainer.processes
        return Role(
            TRAINER,
            command(config.trainer.processes, module, "{run_dir}"),
            resources=Resources(gpus=gpus, threads=config.trainer.threads),
        )

    def export(self, run_dir: RunDir, step: int, out: Path, *, dtype: str = "", adapter: bool = False) -> None:
        """A checkpoint as a Hugging Face folder. Imports torch: see `prl.protocols.TrainerPlugin`."""
        from prl_trainer_fsdp.checkpoint.export import export

        export(run_dir, step, _model(run_dir), self.config, out, dtype, adapter)

    def import_weights(self, run_dir: RunDir, step: int, source: str, out: Path) -> dict[str, str]:
        """A Hugging Face folder as this trainer's part of a checkpoint. Imports torch."""
        from prl_trainer_fsdp.checkpoint.importing import import_weights

        return import_weights(run_dir.checkpoint(step) / "trainer", _model(run_dir), self.config, source, out)

    def bench(self, config: BenchConfig, request: Path) -> tuple[str, ...]:
        """argv of `prl_trainer_fsdp.bench`, in as many ranks as a run would have."""
        return command(config.trainer.processes, "prl_trainer_fsdp.bench", str(request))


def _model(run_dir: RunDir) -> ModelTable:
    return ModelTable.model_validate(json.loads(run_dir.config.read_bytes())["model"])


def command(processes: int, module: str, *arguments: str) -> tuple[str, ...]:
    """argv that runs a module in so many processes of one group."""
    python = sys.executable
    if processes == 1:
        return (python, "-m", module, *arguments)
    return (python, "-m", "prl_trainer_fsdp.ranks", str(processes), "-m", module, *arguments)
