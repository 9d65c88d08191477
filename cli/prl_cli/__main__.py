"""`python -m prl_cli` is `prl`."""

from prl_cli.main import main

main()
