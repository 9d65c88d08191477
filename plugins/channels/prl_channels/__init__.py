"""Weight channels: four ways for bytes to travel, one way to encode and to describe them.

plugin, config  the declarations
channel         what the factories of all four build; its halves are loaded where they are needed
manifest        what both halves agree on: written last, read first
shelf           the directory of versions, one manifest each
layout          tensors one after another in parts
checksum        of bytes on a device
patience        looking again at what a network file system shows late
encoding/       full and delta
transports/     filesystem, shm, cuda_ipc, nccl
sender          the trainer's half
receiver        the engine's half
"""
