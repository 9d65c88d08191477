"""One rank of supervised runs of two: `sft_ranks.py RUN...`, where a run directory's name begins with its layout.

Each is run to its end: a new one, or one that a single process has begun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))

from prl.config.schema import SftConfig
from prl.rundir import RunDir
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.parallel.runtime import end, start
from prl_trainer_fsdp.sft import run as sft

LAYOUTS = {"shard": {}, "ulysses": {"cp": 2}}


def main(folders: list[Path]) -> None:
    config = SftConfig.model_validate(json.loads(RunDir(folders[0]).config.read_bytes()))
    first = start(config)
    for folder in folders:
        layout = LAYOUTS[folder.name.partition("-")[0]]
        runtime = first.laid_out(cast(FsdpConfig, config.trainer.plugin_config()).model_copy(update=layout))
        sft.start = lambda config, runtime=runtime: runtime  # type: ignore[assignment]
        assert sft.main(str(folder)) == 0, folder
        dist.barrier()
    end(0)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
