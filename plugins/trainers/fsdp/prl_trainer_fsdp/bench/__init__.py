"""A training step on synthetic data: `python -m prl_trainer_fsdp.bench REQUEST [PROFILE]`, as one of its ranks.

run       builds, warms up, measures, reports
data      rows of random tokens
named     shapes of known models
shapes    models of such shapes and random weights
parts     clocks, peaks and profiles of any step
"""
