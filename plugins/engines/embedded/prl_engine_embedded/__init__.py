"""The embedded engine: a Hugging Face causal language model served by a process of its own.

plugin, config  the declaration
engine          what the plan runs and how to reach it, without torch
__main__        the process; build: from a configuration to a scheduler; backend: what `prl.engine` serves
model           the loaded model, scoring; weights: new parameters in and back out, whole or not at all
scheduler       what the backend needs of a scheduler; stepped: the thread of one that computes step by step
fixed           fixed-shape batches over slots (its cache and attention); sampling: random numbers counted per request
fitness         whether the fixed scheduler computes what the model computes
continuous      transformers' own scheduler behind the same protocol
"""
