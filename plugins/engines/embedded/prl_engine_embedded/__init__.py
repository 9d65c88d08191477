"""The embedded engine: a Hugging Face causal language model served by a process of its own.

plugin, config  the declaration
client          the half that gateway and controller use, without torch; methods: what the two halves say
__main__        the process; build: from a configuration to a scheduler; server: its handlers, installing weights
model           the loaded model, scoring; weights: new parameters in and back out, whole or not at all
scheduler       what the server needs of a scheduler; stepped: the thread of one that computes step by step
fixed           fixed-shape batches over slots (its cache and attention); sampling: random numbers counted per request
fitness         whether the fixed scheduler computes what the model computes
continuous      transformers' own scheduler behind the same protocol
"""
