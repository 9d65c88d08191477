"""The trainer `fsdp`.

plugin.py, config.py   the declaration
fitness.py             what the files of a model say about whether it can be trained so, before anything starts
role.py                its part of a run's plan
__main__.py            the process: answers the controller while one thread trains
trainer.py             what the controller asks for: train, publish, release, snapshot, checkpoint
assembly.py            from a configuration to a sharded model
memory.py              how blocks are computed: compiled, recomputed, their activations on the host (activations.py)
learner.py             a model, its loss and its optimiser: one step on packed rows
corrections.py         what trainer and engine disagree about weighs less, or nothing
probes.py              what engines must reproduce after installing a version
rows.py                a packed row on its device
metrics.py             sums over rows and ranks; the mismatch between trainer and engine
ranks.py               several processes of one machine as one group
parallel/              layout, groups of ranks, devices, sharding
optim/                 AdamW, SGD and Muon over shards, clipping, the learning rate
checkpoint/            safetensors and JSON of every rank, written while training goes on, read on any number of ranks;
                       to and from Hugging Face folders
sft/                   supervised runs
bench/                 a step on synthetic data, measured
"""
