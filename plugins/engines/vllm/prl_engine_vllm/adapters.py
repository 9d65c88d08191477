"""Low-rank adapters, version by version: vLLM serves each as a LoRA of its own beside the model it started with.

A version is a folder in PEFT's format that every worker loads (`add_lora`). Requests in flight end under the version
they began with, later ones take the newest that was verified, and what nobody uses any more is removed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.adapters import PEFT_CONFIG, PEFT_WEIGHTS, Adapter, peft_config
from prl.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's max_lora_rank may be."""
MOST_AT_ONCE = 8
"""Versions that may be in use at once. Each costs memory for one adapter of every layer."""


def arguments(adapter: Adapter, max_staleness: int) -> dict[str, Any]:
    """The arguments of vLLM that make room for adapters.

    Requests that began with the oldest version still allowed may be in flight while the newest is being verified.

    Raises:
        ConfigError: the rank is larger than vLLM takes.
    """
    if adapter.rank > RANKS[-1]:
        raise ConfigError([f"adapters of rank {adapter.rank}: vLLM takes {RANKS[-1]} at most"])
    count = min(max_staleness + 2, MOST_AT_ONCE)
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= adapter.rank),
        "max_loras": count,
        "max_cpu_loras": count,
        # Else vLLM makes room beside every layer, and beside the head: there its code for CPUs fails as soon as it
        # scores several prompts at once.
        "lora_target_modules": list(adapter.targets),
    }


def write_folder(folder: Path, adapter: Adapter, tensors: Mapping[str, Any]) -> None:
    """Write adapters as PEFT does. `tensors` have PEFT's names and may be on any device."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / PEFT_WEIGHTS, metadata={"format": "pt"})
    (folder / PEFT_CONFIG).write_text(json.dumps(peft_config(adapter)))


class Adapters:
    """The versions that vLLM holds as LoRAs. Which of them requests are given is the gate's business."""

    def __init__(self, llm: AsyncLLM, folder: Path) -> None:
        """`folder` is this process's alone: what a former one left in it is removed."""
        shutil.rmtree(folder, ignore_errors=True)
        self._llm = llm
        self._folder = folder
        self._loaded: dict[int, LoRARequest] = {}
        self._last = 0

    def next_folder(self) -> Path:
        """Where the next version is to be written; its name is vLLM's number of the LoRA."""
        self._last += 1
        return self._folder / str(self._last)

    async def load(self, folder: Path, version: int) -> LoRARequest:
        """Make every worker load a folder; nobody is given it yet.

        Raises:
            WeightsError: vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest

        number = int(folder.name)
        request = LoRARequest(f"version-{version}-{number}", number, str(folder))
        self._loaded[number] = request
        try:
            loaded = await self._llm.add_lora(request)
        except Exception as error:
            raise WeightsError(f"vLLM cannot load the adapters: {type(error).__name__}: {error}") from error
        if not loaded:
            raise WeightsError("vLLM did not load the adapters: were enable_lora and max_lora_rank set?")
        return request

    async def remove_unused(self, in_use: Collection[int]) -> None:
        """Unload every version but those with these numbers, and remove their folders."""
        for number in [number for number in self._loaded if number not in in_use]:
            request = self._loaded.pop(number)
            await self._llm.remove_lora(number)
            shutil.rmtree(request.lora_path, ignore_errors=True)

    def close(self) -> None:
        """The engine ends: remove all folders."""
        shutil.rmtree(self._folder, ignore_errors=True)
