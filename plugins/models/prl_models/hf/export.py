"""Writing a folder in the Hugging Face format: weights, and the config and tokenizer of the model it came from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from prl.errors import StoreError
from prl_models.shards import Entry, ShardWriter

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
SHARD_BYTES = 5_000_000_000


def export_hf(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], source: Path | str, out: Path | str
) -> Path:
    """Write `tensors` (disk names, as `PackedModel.disk_tensors` gives them) as a folder that `from_pretrained` loads.

    Values are written as they are. Everything beside the weights comes from `source`, a local folder or a hub name;
    its `dtype` is set to that of the weights. The folder appears at `out` complete or not at all.

    Raises:
        StoreError: `out` exists and is not empty, or cannot be written.
    """
    with new_folder(Path(out)) as work:
        dtype = _write_weights(tensors.items() if isinstance(tensors, Mapping) else tensors, work)
        _copy_rest(source, work)
        _set_dtype(work / "config.json", dtype)
    return Path(out)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets the name `out` when the block ends well, and is removed otherwise.

    Raises:
        StoreError: `out` exists and is not empty, or cannot be written.
    """
    if out.exists() and any(out.iterdir()):
        raise StoreError(f"{out} is not empty: choose a new folder, or remove it")
    work = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
        if out.exists():
            out.rmdir()
        work.rename(out)
    except OSError as error:
        raise StoreError(f"the model cannot be written to {out}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> torch.dtype:
    """One file, or shards of at most `SHARD_BYTES` (a larger tensor has one alone) with an index. One tensor is in
    memory at a time. Returns the dtype of the first."""
    shards: list[list[Entry]] = []
    shard: ShardWriter | None = None
    try:
        for name, tensor in tensors:
            if shard is None or not _has_room(shard, name, tensor):
                if shard is not None:
                    shard.close()
                shard = ShardWriter(folder / f"part-{len(shards)}", {"format": "pt"})
                shards.append(shard.entries)
            shard.add(name, tensor)
    finally:
        if shard is not None:
            shard.close()
    assert shards, "a model without tensors"
    dtype = shards[0][0].dtype
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtype
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    where = {entry.name: name for entries, name in zip(shards, names, strict=True) for entry in entries}
    total = sum(entry.num_bytes for entries in shards for entry in entries)
    index_file = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2))
    return dtype


def _has_room(shard: ShardWriter, name: str, tensor: Tensor) -> bool:
    return not shard.entries or (shard.size + tensor.nbytes <= SHARD_BYTES and shard.fits(name))


def _copy_rest(source: Path | str, folder: Path) -> None:
    if Path(source).is_dir():
        for file in Path(source).iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and not file.name.startswith("."):
                shutil.copyfile(file, folder / file.name)
        return
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.from_pretrained(source).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2) + "\n")
