"""Supervised runs: `python -m prl_trainer_fsdp.sft RUN_DIR`, which may be one of several ranks.

sources.py      files and datasets: which rows there are, and reading some of them
tables.py       Parquet and `datasets`: columns and their types
records.py      what a row must look like
order.py        which rows a step trains: epochs, shuffling, several sources
rendering.py    conversations to tokens, and which of them are trained
library.py      the same by the library `renderers`
steps.py        one step's rows, rendered and packed
feed.py         the data of one rank, checked and then prepared ahead
prefetch.py     coming steps prepared while one is trained
worker.py       the process that does so
run.py          the run: trains, evaluates, saves, writes the model

What a step trains is a function of its number, the configuration and the data alone. That is why a run may be stopped
after any step, and prepare its steps in any number of processes, without a difference to a bit.
"""
