"""The trainer's part of a checkpoint: safetensors and JSON, nothing that runs code when it is read.

    rank-00003.safetensors   what this rank holds of parameters, buffers and optimiser state
    rank-00003.json          which slices of which tensors those are, size and sha256 of the file, random states
    trainer.json             steps, version, number of ranks; written by the first

Every rank writes what it holds, copies of the same thing are shared out among those that hold them, and nothing is
exchanged. Reading takes from all files the slices that a rank needs, so the number of ranks and the mesh may be others.

layout    which part of a tensor a rank holds, and which of several copies is written
format    the JSON files
save      Saver: a copy in the host's memory between two steps, then files while training goes on
load      everything verified, then read
export    a checkpoint as a Hugging Face folder; importing: the way back
"""

from __future__ import annotations

from prl_trainer_fsdp.checkpoint.format import Index, read_index
from prl_trainer_fsdp.checkpoint.load import Reader, check, compare_model, load
from prl_trainer_fsdp.checkpoint.save import Saver

__all__ = ["Index", "Reader", "Saver", "check", "compare_model", "load", "read_index"]
