"""How segments of bytes get from one process to the other.

base        what a transport is: an outlet in the trainer, an inlet in an engine
filesystem  files
memory      memory of the trainer's process, mapped by engines of the same host
ipc         memory of the trainer's GPU, opened by engines of the same host
nccl        memory of the trainer's GPU, sent to engines that pull it
pull        outlet and inlet of such a transport: how they ask for it, and who waits for how long
cuda        the calls of the CUDA runtime that it takes
host        what files and memory of the host share
origin      which process that is, and why it may not be seen from here
"""
