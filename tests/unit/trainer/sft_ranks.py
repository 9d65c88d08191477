"""One rank of supervised runs of two: `sft_ranks.py RUN...`, where a run directory's name begins with its layout.

Each is run to its end: a new one, or one that a single process has begun.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from prl.config.schema import SftConfig
from prl.rundir import RunDir
from prl_trainer_fsdp.parallel import mesh
from prl_trainer_fsdp.parallel.runtime import Runtime, end, start
from prl_trainer_fsdp.sft import run as sft

LAYOUTS = {"shard": {}, "ulysses": {"cp": 2}}


def laid_out(first: Runtime, name: str, config: SftConfig) -> Runtime:
    own = config.trainer.plugin_config().model_copy(update=LAYOUTS[name])
    layout = own.layout(first.world)  # type: ignore[attr-defined]
    return dataclasses.replace(first, layout=layout, meshes=mesh.make(layout, first.rank, "cpu", "ulysses"))


def main(folders: list[Path]) -> None:
    config = SftConfig.model_validate(json.loads(RunDir(folders[0]).config.read_bytes()))
    first = start(config)
    for folder in folders:
        runtime = laid_out(first, folder.name.partition("-")[0], config)
        sft.start = lambda config, runtime=runtime: runtime  # type: ignore[assignment]
        assert sft.main(str(folder)) == 0, folder
        dist.barrier()
    end(0)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
