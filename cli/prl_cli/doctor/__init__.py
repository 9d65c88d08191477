"""What this machine can do: each finding has a level, what was seen, and a remedy where it is not fine.

machine   Python, limits, memory, shared memory, loopback, disks; looked at in this process
packages  torch, transformers, plugins, engines; looked at in a process of its own (`probe`), which may crash or hang
setup     whether a given configuration fits all of it
"""
