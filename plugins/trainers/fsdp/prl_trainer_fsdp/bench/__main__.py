"""`python -m prl_trainer_fsdp.bench REQUEST [PROFILE]`."""

from __future__ import annotations

import sys

from prl_trainer_fsdp.bench.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
