"""One rank of a trainer of several: `ranks.py MODEL OUT [DTYPE]` trains three steps, publishes, saves and loads.

The first rank writes OUT/weights.safetensors (after three steps), OUT/metrics.json, and OUT/resumed.safetensors (after
the third step repeated from a checkpoint of the second).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))

from prl_trainer_fsdp.parallel import gather, start
from prl_trainer_fsdp.trainer import Trainer
from tests.unit.trainer.helpers import batches, run_config, samples


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: gather(p.detach()).clone() for name, p in trainer.learner.parameters()}


def main(model: Path, out: Path) -> None:
    world = int(os.environ["WORLD_SIZE"])
    config = run_config(model, schedule="linear", decay_steps=10, weight_decay=0.1, processes=world)
    runtime = start(config)
    trainer = Trainer(config, out, runtime)
    reports = []
    for step in (1, 2, 3):
        # The last step has one sample: all ranks but one have nothing to do.
        made = samples(step, step - 1) if step < 3 else samples(step, step - 1)[:1]
        mine = batches(made, step, runtime.world)[runtime.rank]
        if step == 3:
            trainer.checkpoint(2, out / "saved")
            dist.barrier()
        reports.append(trainer.train(mine))
    weights = whole(trainer)
    reference = trainer.publish(3)
    again = Trainer(config, out / "again", runtime)
    again.load_checkpoint(out / "saved")
    again.train(batches(samples(3, 2)[:1], 3, runtime.world)[runtime.rank])
    resumed = whole(again)
    assert reference.version == 3, reference  # every rank knows where it is
    if runtime.is_leader:
        save_file(weights, out / "weights.safetensors")
        save_file(resumed, out / "resumed.safetensors")
        (out / "metrics.json").write_text(json.dumps([report.metrics for report in reports]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
