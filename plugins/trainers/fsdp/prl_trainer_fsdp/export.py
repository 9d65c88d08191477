"""A checkpoint as a Hugging Face folder, for `prl export`: one process, on the CPU, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prl.config.schema import ModelTable
from prl.rundir import RunDir
from prl_models.hf.export import export_hf
from prl_models.provider import load_model
from prl_trainer_fsdp.assembly import skeleton_options
from prl_trainer_fsdp.checkpoint import Reader, compare_model, read_index
from prl_trainer_fsdp.checkpoint.format import BUFFER, PARAMETER
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import disk_tensors


def export(run_dir: RunDir, step: int, table: ModelTable, config: FsdpConfig, out: Path) -> None:
    """Write the weights of a checkpoint in the dtype the run computed with. All else comes from the original model.

    Raises:
        StoreError: the checkpoint is damaged or of another model, or `out` cannot be written.
    """
    model: Any = load_model(table.path, table.impl, skeleton_options(table, config))
    index = read_index(run_dir.checkpoint(step) / "trainer")
    compare_model(index, model)
    index.verify()
    names = stand_ins(model)
    with Reader(index) as reader, model.stored() as stored:

        def value(tensor: Tensor) -> Tensor:
            name = names[tensor.data_ptr()]
            short = name.removeprefix("hf.")
            for kind in (PARAMETER, BUFFER):
                if short in index.of(kind):
                    return reader.whole(kind, short)
            return stored(short).to(tensor.dtype)  # beside adapters the model is as it was

        export_hf(disk_tensors(model, table.dtype, value), table.path, out)


def stand_ins(model: nn.Module) -> dict[int, str]:
    """Give every parameter and buffer of a model on `meta` the shape it has and a single number as its memory, and
    return their names by address: what a model does with its tensors then tells which ones they are."""
    made: dict[int, Tensor] = {}
    names: dict[int, str] = {}

    def replace(tensors: dict[str, Any], prefix: str, wrap: Callable[[Tensor], Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                if id(tensor) not in made:
                    number = torch.empty(1, dtype=tensor.dtype)
                    made[id(tensor)] = wrap(number.expand(tensor.shape) if tensor.ndim else number[0])
                    names[number.data_ptr()] = f"{prefix}.{key}" if prefix else key
                tensors[key] = made[id(tensor)]

    kept = []  # or another tensor could get the id of one that is gone
    for prefix, module in model.named_modules():
        kept += [*module._parameters.values(), *module._buffers.values()]
        replace(module._parameters, prefix, lambda tensor: nn.Parameter(tensor, requires_grad=False))
        replace(module._buffers, prefix, lambda tensor: tensor)
    return names
