"""One of two ranks that save and load one another's checkpoints in other layouts: `reshard.py MODEL OUT`.

Folders of OUT: a (two shards, two steps), a-b (of a, by one process), a-b-c (of a-b, by two); s (one process), s-d (of
s, by two shards), s-d-e (of s-d, by two that share rows). With "3" behind: after one more step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from prl.errors import StoreError
from prl_trainer_fsdp.checkpoint import Saver
from prl_trainer_fsdp.parallel.runtime import Runtime, end, start
from prl_trainer_fsdp.trainer import Trainer
from tests.unit.trainer.helpers import CPU, run_config
from tests.unit.trainer.ranks import configured, laid_out, mine


def main(model: Path, out: Path) -> None:
    first = start(run_config(model, processes=int(os.environ["WORLD_SIZE"])))

    def trainer(layout: str, runtime: Runtime) -> Trainer:
        return Trainer(configured(model, layout, runtime.world), out / "weights", runtime)

    def save(trainer: Trainer, name: str) -> None:
        trainer.snapshot(trainer.version)
        trainer.checkpoint(trainer.version, out / name)

    def train(trainer: Trainer, *steps: int) -> Trainer:
        for step in steps:
            trainer.train(mine(trainer.runtime, step))
        return trainer

    def passed_on(layout: str, runtime: Runtime, source: str, name: str, *, step: bool = True) -> None:
        again = trainer(layout, runtime)
        again.load_checkpoint(out / source)
        save(again, name)
        if step:
            save(train(again, 3), f"{name}3")

    two = train(trainer("fsdp", first), 1, 2)
    save(two, "a")
    check_saver(two, out)
    save(train(two, 3), "a3")
    dist.barrier()
    if first.is_leader:
        passed_on("fsdp", CPU, "a", "a-b", step=False)
        one = train(trainer("fsdp", CPU), 1, 2)
        save(one, "s")
        save(train(one, 3), "s3")
    dist.barrier()
    passed_on("fsdp", first, "a-b", "a-b-c")
    passed_on("fsdp", first, "s", "s-d", step=False)
    dist.barrier()
    passed_on("ulysses", laid_out(first, "ulysses"), "s-d", "s-d-e", step=False)
    dist.barrier()
    if first.is_leader:
        passed_on("fsdp", CPU, "s-d-e", "s-d-e-f")
    dist.barrier()
    end(0)


def check_saver(trainer: Trainer, out: Path) -> None:
    """As a supervised run saves: the leader learns of all files, and all ranks of a failure of one."""
    saver = Saver(trainer.learner)
    saver.begin({"step": 2}, out / "supervised")
    while not saver.written():
        time.sleep(0.01)
    files = saver.wait()
    assert len(files) == (5 if trainer.runtime.is_leader else 2) and not saver.pending, files
    (out / f"file{trainer.runtime.rank}").write_text("")
    saver.begin({"step": 2}, out / ("good" if trainer.runtime.is_leader else "file1/bad"))
    try:
        saver.wait()
    except StoreError as error:
        said = str(error)
    wanted = "another rank could not write" if trainer.runtime.is_leader else "cannot be written"
    assert wanted in said, said


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
