"""The wire between gateway or controller and an engine's process, for any engine that likes to use it.

methods  what the two halves say; client: the half of gateway and controller, an `EngineClient`
backend  what an engine provides to be served; server: the half in the engine's process, and its heartbeats
probes   whether the engine computes what the trainer does, and how well

An engine plugin may have a wire of its own instead. This one costs about 5 us a request.
"""
