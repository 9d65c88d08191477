"""A Hugging Face folder's weights as a checkpoint, for `prl import`: one process, on the CPU, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from prl.adapters import PEFT_CONFIG, PEFT_WEIGHTS, peft_name
from prl.config.schema import ModelTable
from prl.errors import StoreError, UsageError
from prl_models.provider import load_model
from prl_models.shards import Entry, bytes_of, write_file
from prl_trainer_fsdp.assembly import skeleton_options
from prl_trainer_fsdp.checkpoint import compare_model, read_index
from prl_trainer_fsdp.checkpoint.format import BUFFER, PARAMETER, Facts, Piece, RankFile, Stored, rank_name
from prl_trainer_fsdp.checkpoint.save import write_documents
from prl_trainer_fsdp.config import FsdpConfig, LoraTable
from prl_trainer_fsdp.learner import persistent_buffers, trained_parameters

Read = Callable[[str], Tensor]


def import_weights(former: Path, table: ModelTable, config: FsdpConfig, source: str, out: Path) -> dict[str, str]:
    """Write a trainer's part of a checkpoint into `out`: weights of `source`, an optimiser that has not begun, and
    steps, version and random states of the part `former`.

    Args:
        source: a folder in the Hugging Face format, or a name on the hub; of a run that trains adapters, a folder in
            PEFT's.

    Returns:
        Name to sha256 of the files.

    Raises:
        UsageError: the model there is another one than the run's. ConfigError: there is none that can be read.
        StoreError: `out` cannot be written, or `former` is damaged.
    """
    before = read_index(former)
    if config.lora is None:
        there = table.model_copy(update={"path": source})
        model: Any = load_model(source, table.impl, skeleton_options(there, config))
        values: AbstractContextManager[Read] = model.stored()
    else:
        model = load_model(table.path, table.impl, skeleton_options(table, config))
        values = _adapters(Path(source), config.lora)
    try:
        compare_model(before, model)
    except StoreError as error:
        raise UsageError(f"{source} is another model than the run's: {error}") from error
    tensors = [(PARAMETER, name, parameter) for name, parameter in trained_parameters(model)]
    tensors += [(BUFFER, name, buffer) for name, buffer in persistent_buffers(model)]
    entries = [Entry(f"{kind}/{name}", tensor.dtype, tuple(tensor.shape)) for kind, name, tensor in tensors]
    held = RankFile(f"{rank_name(0)}.safetensors", 0, "", {}, before.ranks[0].random)
    for entry, (kind, name, _) in zip(entries, tensors, strict=True):
        piece = Piece(entry.name, (0,) * len(entry.shape), entry.shape)
        dtype = str(entry.dtype).removeprefix("torch.")
        held.tensors.setdefault(kind, {})[name] = Stored(entry.shape, dtype, [piece])
    try:
        out.mkdir(parents=True, exist_ok=True)
        with values as stored:
            data = (bytes_of(_checked(name, stored(name), like)) for _, name, like in tensors)
            held.bytes, held.sha256 = write_file(out / held.file, entries, data)
        return write_documents(out, held, Facts(1, before.facts.optimizer_steps, before.facts.facts))
    except OSError as error:
        raise StoreError(f"the checkpoint cannot be written to {out}: {error}") from error


def _checked(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.shape != like.shape:
        raise UsageError(f"{name!r} has shape {list(tensor.shape)} there, {list(like.shape)} in the run")
    if not bool(tensor.isfinite().all()):
        raise UsageError(f"{name!r} has values there that are not finite: training could not go on from them")
    return tensor.to(like.dtype).contiguous()


@contextmanager
def _adapters(folder: Path, lora: LoraTable) -> Iterator[Read]:
    """Adapters in PEFT's format. Raises: UsageError: there are none, or of another rank or scale."""
    try:
        described = json.loads((folder / PEFT_CONFIG).read_text())
        with safe_open(folder / PEFT_WEIGHTS, "pt") as file:
            for key, here in (("r", lora.rank), ("lora_alpha", lora.alpha)):
                if described.get(key) != here:
                    raise UsageError(f"{folder} has adapters with {key} = {described.get(key)}, the run has {here}")
            there = sorted(described.get("target_modules", []))
            if there != sorted(lora.targets):
                raise UsageError(f"{folder} has adapters of {there}, the run of {sorted(lora.targets)}")
            yield lambda name: file.get_tensor(peft_name(name))
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"{folder} holds no adapters that can be read ({error}). The run trains adapters: give it a folder that "
            "`prl export --adapter` or PEFT wrote"
        ) from error
