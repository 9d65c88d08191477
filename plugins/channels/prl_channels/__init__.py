"""Weight channels.

plugin, config  the declaration
filesystem      the channel of that name: its two halves, each loaded where it is needed
sender          the trainer's half; shard: one safetensors file and its checksum in one pass
receiver        the engine's half
manifest        what both agree on
"""
