"""vLLM as an engine, in two interpreters: the plan is made in prl's, the engine runs in the one that has vLLM.

plugin, config   the declaration
engine           what the plan runs and how to reach it; interpreter: which Python has vLLM
__main__         the process; settings: variables that vLLM reads; lastwords: what vLLM said before it gave up;
                 leftovers: what it would leave in /dev/shm
arguments        from the table to `vllm serve`'s arguments, through vLLM's own parser
check            whether vLLM would start, under its interpreter; precheck: asking that before anything starts
backend          what `prl.engine` serves: generation and installing weights, joined
generation       requests in, tokens out, the versions of tokens; flights: requests in flight; gauges: how full it is;
                 metrics: vLLM's own counts; outbox: what goes to the engine core
gate             what installing weights needs of generation
install          from an announced version to a verified one; worker: its half in vLLM's workers; reload: into the
                 model; probes: the comparison; adapters: low-rank ones, beside the weights
http             vLLM's own HTTP interface behind the run's token
"""
