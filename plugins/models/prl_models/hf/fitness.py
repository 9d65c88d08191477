"""Whether a transformers model may be trained on packed documents, and by ranks that share a row.

`refuse` reads the configuration, before memory is taken. `check_packing` tries the loaded model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from prl.errors import EnvironmentNotFit
from prl_models.batch import PackedBatch
from prl_models.blocks.context import ContextParallel, check_heads

if TYPE_CHECKING:
    from prl_models.hf.provider import HfModel

TOLERANCE = 1e-3
"""Largest difference of a log-probability, float32, between packed and separate documents: real ones are below 1e-5,
a leak or a missing cap is above 1e-1."""

_PLAIN = {"full_attention", "sliding_attention", "dense", "sparse"}
"""Layer types of transformers that carry nothing along the row but causal attention ("sparse": a layer of experts)."""
_MISSING = {
    "index_topk": "an indexer chooses which keys its attention sees",
    "attn_logit_softcapping": "its attention caps its scores",
    "final_logit_softcapping": "its head caps its logits",
}
"""Keys of a configuration, and what a model that has them does that neither packed attention nor our head does."""


def refuse(config: PreTrainedConfig, context: ContextParallel | None) -> None:
    """
    Raises:
        EnvironmentNotFit: the model mixes tokens by something other than plain causal attention, or caps it.
        ConfigError: its heads or its windows do not allow the ranks to share a row.
    """
    text = config.get_text_config()
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    named = f'model type {text.model_type!r} cannot be trained with impl = "hf"'
    kinds = set(getattr(text, "layer_types", None) or ())
    for key, does in _MISSING.items():
        if (value := getattr(text, key, None)) is not None:
            raise EnvironmentNotFit(f"{named}: {does} ({key} = {value}). Use a model without it, or a plugin for it")
    if getattr(model, "_is_stateful", False) or kinds - _PLAIN:
        why = f"its layers {', '.join(sorted(kinds - _PLAIN))}" if kinds - _PLAIN else "its recurrent state"
        raise EnvironmentNotFit(
            f"{named}: documents packed into one row would leak into one another through {why}, and ranks that share a "
            "row would have to hand it on. Use a model with plain causal attention, or a model plugin for it"
        )
    if context is not None:
        rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
        if rope in ("dynamic", "longrope"):
            raise EnvironmentNotFit(
                f"{named} and trainer.cp = {context.size}: transformers chooses the frequencies of its {rope!r} rotary "
                "embedding by the last position it sees, which differs from rank to rank. Use cp = 1"
            )
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        check_heads(heads, kv_heads, context.size, context.style, window_of(text))


def window_of(text: PreTrainedConfig) -> int | None:
    """The sliding window that some layer has."""
    kinds = getattr(text, "layer_types", None)
    return getattr(text, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None


def longest_document(text: PreTrainedConfig) -> int | None:
    """Up to which length transformers embeds positions by fixed frequencies, where it chooses them by the longest
    document of a row; None: always."""
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        return int(text.max_position_embeddings)
    if rope.get("rope_type") == "longrope":
        return int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
    return None


@torch.no_grad()
def check_packing(model: HfModel) -> None:
    """Compare two packed documents with transformers' own log-probabilities of each alone, on CPU; then, collectively,
    the same row where ranks share it.

    Raises:
        EnvironmentNotFit: they differ by more than `TOLERANCE`, or attention cannot be replaced.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, model.vocab_size, length).astype(np.int32) for length in (5, 7)]
    expected = _separate(model, documents)
    named = f'model type {model.hf.config.model_type!r} cannot be trained with impl = "hf"'
    if not model.takes_attention():
        raise EnvironmentNotFit(
            f"{named}: its attention does not come from transformers' registry (AttentionInterface), so it cannot be "
            "replaced by packed attention. Use another model, or a model plugin for it"
        )
    difference = _difference(model, documents, expected, None)
    if not difference <= TOLERANCE:
        raise EnvironmentNotFit(
            f"{named}: two packed documents give log-probabilities that differ from transformers' own by "
            f"{difference:.3g} (limit {TOLERANCE:g}). Its attention mixes documents, or its head is more than a matrix "
            "product"
        )
    context = model.context
    if context is None or torch.device("cpu") not in context.group._device_types:
        return
    difference = _difference(model, documents, expected, context)
    if not difference <= TOLERANCE:
        raise EnvironmentNotFit(
            f"{named} and trainer.cp = {context.size}: a row that ranks share gives log-probabilities that differ from "
            f"transformers' own by {difference:.3g} (limit {TOLERANCE:g}). Something other than its attention mixes "
            "tokens: use cp = 1"
        )


def _separate(model: HfModel, documents: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
    model.hf.set_attn_implementation("eager")
    parts = []
    for document in documents:
        tokens = torch.from_numpy(document.astype(np.int64))
        logits = model.hf(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        parts.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    return torch.cat(parts)


def _difference(
    model: HfModel,
    documents: list[np.ndarray[tuple[int], np.dtype[np.int32]]],
    expected: Tensor,
    context: ContextParallel | None,
) -> float:
    bounds = np.cumsum([0, *map(len, documents)]).astype(np.int32)
    targets = np.setdiff1d(np.arange(bounds[-1]), bounds[:-1])
    ones = np.ones(len(targets), np.float32)
    batch = PackedBatch.build(
        np.concatenate(documents), bounds, targets, ones, torch.device("cpu"), share=False, context=context
    )
    found, _ = model.check(batch, context)
    wanted = expected if batch.mine is None else expected[batch.mine]
    worst = (found - wanted).abs().nan_to_num(nan=torch.inf).max() if len(found) else torch.zeros(())
    if context is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=context.group)
    return worst.item()
