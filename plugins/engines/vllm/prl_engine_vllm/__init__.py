"""vLLM as an engine, in two interpreters: the plan is made in prl's, the engine runs in the one that has vLLM.

plugin, config   the declaration
engine           what the plan runs and how to reach it; interpreter: which Python has vLLM
gate             what installing weights needs of generation
"""
