"""The trainer's part of a run's plan. Imports nothing heavy: it runs in the command line's process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prl.config.bench import BenchConfig
from prl.config.schema import ModelTable, RunConfig, SftConfig
from prl.plan import Resources, Role
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
            "trainer",
            command(config.trainer.processes, module, "{run_dir}"),
            resources=Resources(gpus=gpus, threads=config.trainer.threads),
        )

    def export(self, run_dir: RunDir, step: int, out: Path) -> None:
        """A checkpoint as a Hugging Face folder. Imports torch: see `prl.protocols.TrainerPlugin`."""
        from prl_trainer_fsdp.export import export

        table = ModelTable.model_validate(json.loads(run_dir.config.read_bytes())["model"])
        export(run_dir, step, table, self.config, out)

    def bench(self, config: BenchConfig, request: Path) -> tuple[str, ...]:
        """argv of `prl_trainer_fsdp.bench`, in as many ranks as a run would have."""
        return command(config.trainer.processes, "prl_trainer_fsdp.bench", str(request))


def command(processes: int, module: str, *arguments: str) -> tuple[str, ...]:
    """argv that runs a module in so many processes of one group."""
    python = sys.executable
    if processes == 1:
        return (python, "-m", module, *arguments)
    return (python, "-m", "prl_trainer_fsdp.ranks", str(processes), "-m", module, *arguments)
