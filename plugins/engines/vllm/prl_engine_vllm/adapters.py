"""Low-rank adapters, version by version: vLLM serves each as a LoRA of its own beside the model it started with.

A version is a folder in PEFT's format that every worker loads (`add_lora`). Requests in flight end under the version
they began with, later ones take the newest that was verified; one that nobody uses any more is removed.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.adapters import Adapter
from prl.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

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
    }


def write_folder(folder: Path, adapter: Adapter, tensors: Mapping[str, Any]) -> None:
    """Write adapters as PEFT does. `tensors` have PEFT's names and may be on any device."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted(adapter.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))


class Adapters:
    """The versions that vLLM holds as LoRAs. `current` is what a request that starts now is to be given."""

    def __init__(self, llm: AsyncLLM, folder: Path) -> None:
        """`folder` is this process's alone: what a former one left in it is removed."""
        shutil.rmtree(folder, ignore_errors=True)
        self.current: LoRARequest | None = None
        self._llm = llm
        self._folders = folder
        self._loaded: dict[int, LoRARequest] = {}
        self._in_use: Counter[int] = Counter()
        self._last = 0

    def folder(self) -> Path:
        """Where the next version is to be written."""
        self._last += 1
        return self._folders / f"{self._last}"

    async def load(self, folder: Path, version: int) -> LoRARequest:
        """Make every worker load a folder; nobody is given it yet.

        Raises:
            WeightsError: vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"version-{version}-{folder.name}", int(folder.name), str(folder))
        try:
            loaded = await self._llm.add_lora(request)
        except Exception as error:
            raise WeightsError(f"vLLM cannot load the adapters: {type(error).__name__}: {error}") from error
        if not loaded:
            raise WeightsError("vLLM did not load the adapters: are enable_lora and max_lora_rank set?")
        self._loaded[request.lora_int_id] = request
        return request

    def serve(self, request: LoRARequest) -> None:
        """From now on requests are given this version."""
        self.current = request

    def take(self) -> LoRARequest | None:
        """For a request that starts. It must be given back with `give_back`."""
        if self.current is not None:
            self._in_use[self.current.lora_int_id] += 1
        return self.current

    def give_back(self, request: LoRARequest | None) -> None:
        if request is not None:
            self._in_use[request.lora_int_id] -= 1

    async def remove_unused(self) -> None:
        """Unload every version but the current one and those that requests in flight began with."""
        keep = self.current.lora_int_id if self.current is not None else 0
        for number in [n for n in self._loaded if n != keep and self._in_use[n] <= 0]:
            request = self._loaded.pop(number)
            del self._in_use[number]
            await self._llm.remove_lora(number)
            shutil.rmtree(request.lora_path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._folders, ignore_errors=True)
