"""The trainer `fsdp`.

plugin.py, config.py   the declaration
role.py                its part of a run's plan
__main__.py            the process: answers the controller while one thread trains
trainer.py             what the controller asks for: train, publish, release, snapshot, checkpoint
assembly.py            from a configuration to a sharded model
memory.py              how blocks are computed: compiled, recomputed, their activations on the host (activations.py)
learner.py             a model, its loss and its optimiser: one step on packed rows
rows.py                a packed row on its device
optim.py               AdamW, SGD and Muon over shards, clipping: muon.py whole matrices, offload.py the state on the
                       host, schedules.py the rate
metrics.py             sums over rows and ranks; the mismatch between trainer and engine
layout.py, mesh.py     which ranks share what: the numbers, and the groups
parallel.py            devices, process group, sharding
ranks.py               several processes of one machine as one group
checkpoint/            safetensors and JSON of every rank, written while training goes on, read on any number of ranks
export.py              a checkpoint as a Hugging Face folder; importing.py the way back
sft/                   supervised runs
bench.py               a step on synthetic data: bench_data.py its rows, bench_shapes.py and bench_named.py models
                       of random weights, bench_parts.py clocks and profiles
"""
