"""vLLM as an engine, in two interpreters: the plan is made in prl's, the engine runs in the one that has vLLM.

plugin, config   the declaration
engine           what the plan runs and how to reach it; interpreter: which Python has vLLM
gate             what installing weights needs of generation
install          one version of the weights, whole and verified or not at all; probes: what they must reproduce
worker           what is added to vLLM's workers: reading versions; reload: putting them into vLLM's model
adapters         versions that are low-rank adapters
"""
