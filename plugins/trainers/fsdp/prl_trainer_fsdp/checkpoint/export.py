"""A checkpoint as a Hugging Face folder, for `prl export`: one process, on the CPU, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prl.adapters import PEFT_CONFIG, PEFT_WEIGHTS, Adapter, peft_config, peft_name
from prl.config.schema import ModelTable
from prl.errors import UsageError
from prl.rundir import RunDir
from prl_models.hf.export import export_hf, new_folder
from prl_models.provider import load_model
from prl_models.shards import ShardWriter
from prl_trainer_fsdp.assembly import skeleton_options
from prl_trainer_fsdp.checkpoint import Index, Reader, compare_model, read_index
from prl_trainer_fsdp.checkpoint.format import BUFFER, PARAMETER
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.learner import disk_tensors


def export(
    run_dir: RunDir, step: int, table: ModelTable, config: FsdpConfig, out: Path, dtype: str, adapter: bool
) -> None:
    """Write the weights of a checkpoint, adapters merged; all else comes from the original model.

    Args:
        dtype: of the weights; "" for that which the run computed with, and float32 for adapters alone.
        adapter: write the adapters alone, in the format of PEFT.

    Raises:
        UsageError: adapters alone are asked for, and there are none.
        StoreError: the checkpoint is damaged or of another model, or `out` cannot be written.
    """
    if adapter and config.adapter is None:
        raise UsageError("the run has no adapters: it trained the whole model. Export it without --adapter")
    model: Any = load_model(table.path, table.impl, skeleton_options(table, config))
    index = read_index(run_dir.checkpoint(step) / "trainer")
    compare_model(index, model)
    index.verify()
    if adapter and config.adapter is not None:
        _export_adapter(index, config.adapter, table.path, getattr(torch, dtype or "float32"), out)
    else:
        export_hf(_whole(index, model, dtype or table.dtype), table.path, out)


def _whole(index: Index, model: Any, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) of the whole model."""
    names = stand_ins(model)
    with Reader(index) as reader, model.stored() as stored:

        def value(tensor: Tensor) -> Tensor:
            name = names[tensor.data_ptr()].removeprefix("hf.")
            for kind in (PARAMETER, BUFFER):
                if name in index.of(kind):
                    return reader.whole(kind, name)
            return stored(name).to(tensor.dtype)  # beside adapters the model is as it was

        yield from disk_tensors(model, dtype, value)


def _export_adapter(index: Index, adapter: Adapter, base: str, dtype: torch.dtype, out: Path) -> None:
    """As PEFT's `save_pretrained` does: `PeftModel.from_pretrained(model, out)` loads it."""
    with Reader(index) as reader, new_folder(out) as work:
        shard = ShardWriter(work / PEFT_WEIGHTS, {"format": "pt"})
        for name in sorted(index.of(PARAMETER)):
            shard.add(peft_name(name), reader.whole(PARAMETER, name).to(dtype))
        shard.close()
        (work / PEFT_CONFIG).write_text(json.dumps(peft_config(adapter, base), indent=2) + "\n")


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
