"""`python -m prl_trainer_fsdp.sft RUN_DIR`."""

from __future__ import annotations

import sys

from prl_trainer_fsdp.parallel.runtime import end
from prl_trainer_fsdp.sft.run import main

if __name__ == "__main__":
    end(main(sys.argv[1]))
