"""Tiny models with peaked distributions, versions of their weights in a channel, what a forward pass says of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prl.protocols import Adapter, Probe

VOCABULARY = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def make(kind: str, seed: int) -> Any:
    """A model of the kind "tied", "untied" or "moe" in float32. Random weights are sharpened: where all tokens are
    equally likely, no error shows."""
    torch.manual_seed(seed)
    if kind == "tied":
        model: Any = LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=128, tie_word_embeddings=True))
    elif kind == "untied":
        model = Qwen3ForCausalLM(Qwen3Config(**COMMON, intermediate_size=128, tie_word_embeddings=False))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **COMMON, intermediate_size=128, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
                decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False,
            )
        )  # fmt: skip
    # Larger factors amplify what float32 rounds away beyond 1e-5.
    head, rest = (8.0, 4.0) if kind == "tied" else (12.0, 3.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(head if "embed" in name or "lm_head" in name else rest)
    return model.eval()


def disk_tensors(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors as `save_pretrained` names them (experts one by one), by way of a folder."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


ADAPTER = Adapter(8, 16.0, ("q_proj", "v_proj", "down_proj"))


@torch.no_grad()
def adapt(model: Any, seed: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Random adapters under PEFT's names, and a copy of the model with them merged into it."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    tensors = {}
    for name, parameter in merged.named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(ADAPTER.targets):
            out, into = parameter.shape
            a = torch.randn(ADAPTER.rank, into, generator=generator) * 0.1
            b = torch.randn(out, ADAPTER.rank, generator=generator) * 0.1
            tensors |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
            parameter += ADAPTER.alpha / ADAPTER.rank * b @ a
    return tensors, merged


def probes(model: Any) -> list[Probe]:
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(1, VOCABULARY, (count,), generator=generator).tolist() for count in (24, 17, 9)]
    return [Probe(ids, [0.0, *forward(model, ids)]) for ids in sequences]


@torch.no_grad()
def forward(model: Any, ids: Sequence[int]) -> list[float]:
    """f32[T-1]: the log-probability of every token but the first."""
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist()


@torch.no_grad()
def replay(
    models: dict[int, Any], prompt: Sequence[int], tokens: Sequence[int], versions: Sequence[int]
) -> list[float]:
    """The log-probability of every token where keys and values are kept over a change of weights: those of a token are
    of the version that read it, which is the version that sampled the token after it."""
    cache = DynamicCache()
    read = [*prompt, *tokens]
    found: list[float] = []
    start, at = 0, 0
    while at < len(tokens):
        end = at
        while end < len(tokens) and versions[end] == versions[at]:
            end += 1
        inputs = read[start : len(prompt) + end - 1]
        logits = models[versions[at]](input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits
        logprobs = torch.log_softmax(logits[0, -(end - at) :].float(), -1)
        found += logprobs.gather(1, torch.tensor(tokens[at:end])[:, None])[:, 0].tolist()
        start, at = len(prompt) + end - 1, end
    return found
