"""Writing a folder in the Hugging Face format: weights, and the config and tokenizer of the model it came from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from prl.errors import StoreError

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
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise StoreError(f"{out} is not empty: choose a new folder, or remove it")
    work = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        dtype = _write_weights(((name, tensor.detach().cpu().contiguous()) for name, tensor in pairs), work)
        _copy_rest(source, work)
        _set_dtype(work / "config.json", dtype)
        if out.exists():
            out.rmdir()
        work.rename(out)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise StoreError(f"the model cannot be written to {out}: {error}") from error
    return out


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> torch.dtype:
    """One file, or shards of at most `SHARD_BYTES` with an index. Returns the dtype of the first tensor."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0
    dtype = torch.float32

    def flush() -> None:
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))

    for index, (name, tensor) in enumerate(tensors):
        dtype = tensor.dtype if index == 0 else dtype
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return dtype
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    where = {tensor: name for tensors_of, name in zip(shards, names, strict=True) for tensor in tensors_of}
    index_file = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2))
    return dtype


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
