"""One rank of two: `shards.py MODEL OUT CASES` trains every case (JSON: name to the trainer's keys) for five steps.

The first rank writes OUT/NAME.safetensors: what was trained, the optimiser's state, and under "disk." what would be
published.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))

from prl_trainer_fsdp.parallel.runtime import end, start
from prl_trainer_fsdp.parallel.sharding import gather
from prl_trainer_fsdp.trainer import Trainer
from tests.unit.trainer.helpers import batches, run_config, samples


def result(trainer: Trainer) -> dict[str, torch.Tensor]:
    trained = {name: gather(p.detach()).clone() for name, p in trainer.learner.parameters()}
    state = {f"state.{name}": gather(value).clone() for name, value in trainer.learner.optimizer.named_state()}
    disk = {f"disk.{name}": value.clone() for name, value in trainer.learner.disk_tensors()}
    return {**trained, **state, **disk}


def train(trainer: Trainer, ranks: int, rank: int, steps: range) -> None:
    for step in steps:
        trainer.train(batches(samples(step, step - 1), step, ranks)[rank])


def main(model: Path, out: Path, cases: dict[str, dict[str, Any]]) -> None:
    configs = {name: run_config(model, **keys, processes=int(os.environ["WORLD_SIZE"])) for name, keys in cases.items()}
    first = start(next(iter(configs.values())))
    for name, config in configs.items():
        runtime = first.laid_out(config.trainer.plugin_config())
        trainer = Trainer(config, out / name, runtime)
        train(trainer, runtime.layout.data_ranks, runtime.data_rank, range(1, 6))
        found = result(trainer)
        if runtime.is_leader:
            save_file({key: value.contiguous() for key, value in found.items()}, out / f"{name}.safetensors")
        dist.barrier()
    end(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
