"""Loading the model, and the plain forward passes of it: scoring sequences.

`LoadedModel` is shared by both schedulers. One thread at a time uses it: the scheduler's, or whoever holds that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from prl.config.schema import ModelTable
from prl.errors import EnvironmentNotFit, UsageError

SCORE_LOGITS = 2**28
"""Logits of one scoring pass, 1 GB in float32, unless a single sequence has more."""


class LoadedModel:
    """A causal language model with its limits.

    Args:
        module: transformers' model in evaluation mode.
        max_tokens: the longest sequence it may hold, prompt and completion together.
    """

    def __init__(self, module: Any, device: torch.device, max_tokens: int) -> None:
        self.module = module
        self.device = device
        self.max_tokens = max_tokens
        self.lock = threading.RLock()
        """Held by whoever scores or changes weights: holding the scheduler keeps it out, not one another."""

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability at temperature 1 of every token given those before it; the first is 0.

        Raises:
            UsageError: a sequence is empty or longer than the model allows.
        """
        for sequence in sequences:
            if not 0 < len(sequence) <= self.max_tokens:
                raise UsageError(f"cannot score {len(sequence)} tokens: 1 to {self.max_tokens} are possible")
        most = SCORE_LOGITS // self.module.get_input_embeddings().weight.shape[0]
        results: list[list[float]] = []
        start = 0
        while start < len(sequences):
            width, end = 0, start
            while end < len(sequences):
                wider = max(width, len(sequences[end]))
                if end > start and wider * (end - start + 1) > most:
                    break
                width, end = wider, end + 1
            with self.lock:
                results.extend(self._score(sequences[start:end], width))
            start = end
        return results

    def _score(self, sequences: Sequence[Sequence[int]], width: int) -> list[list[float]]:
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
        ids = ids.to(self.device)
        logits = self.module(input_ids=ids, position_ids=_positions(ids), use_cache=False).logits[:, :-1].float()
        picked = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0].cpu()
        return [[0.0, *picked[row, : len(sequence) - 1].tolist()] for row, sequence in enumerate(sequences)]


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape)


def choose_device(wanted: str) -> torch.device:
    """Raises:
    EnvironmentNotFit: a GPU is asked for and there is none.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise EnvironmentNotFit('engine.device = "cuda", and torch finds no GPU here: use device = "cpu" or "auto"')
    return torch.device(wanted)


def load(table: ModelTable, device: torch.device, attention: str, max_sequence_tokens: int) -> LoadedModel:
    """Load a Hugging Face causal language model for inference.

    Raises:
        UsageError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    if Path(table.path).is_dir() and not (Path(table.path) / "config.json").exists():
        raise UsageError(f"model.path: {table.path} has no config.json: it is no model folder in Hugging Face format")
    try:
        module = AutoModelForCausalLM.from_pretrained(
            table.path, dtype=getattr(torch, table.dtype), attn_implementation=attention
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: transformers cannot load {table.path!r}: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    return LoadedModel(module, device, sequence_limit(module.config, max_sequence_tokens))


def sequence_limit(config: Any, wanted: int) -> int:
    """The longest sequence: what was asked for, within what the model's configuration allows."""
    allowed = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    if wanted and allowed:
        return min(wanted, allowed)
    return wanted or allowed or 4096
