"""`python -m prl_trainer_fsdp.bench REQUEST [PROFILE]`."""

from __future__ import annotations

import sys

from prl_trainer_fsdp.bench.run import main
from prl_trainer_fsdp.parallel.runtime import end

if __name__ == "__main__":
    end(main(sys.argv[1:]))
