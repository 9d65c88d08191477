"""The provider `hf`: a model class of transformers as it is, with packed attention and the chunked head around it.

Packing works through `AttentionInterface.register`: transformers hands `packing`, a keyword of ours, down to every
attention layer. It is safe only where nothing else mixes tokens. So models with a state along the row are refused by
name, and whatever is loaded must reproduce transformers' own log-probabilities of two separate documents when both are
packed into one row; that also finds a head with a bias, a scale or a soft cap, which the chunked head does not apply.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from prl.contribution import PluginConfig
from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.batch import PackedBatch
from prl_models.blocks.attention import packed_attention
from prl_models.blocks.head import logprobs_and_entropy
from prl_models.options import Kernels, ModelOptions
from prl_models.provider import Gather, Place

log = logging.getLogger(__name__)

ATTENTION = "prl_packed"
TOLERANCE = 1e-3
"""Largest difference of a log-probability, float32, between packed and separate documents: real ones are below 1e-5,
a leak or a missing cap is above 1e-1."""


def build(config: PluginConfig) -> HfProvider:
    return HfProvider()


class HfProvider:
    def load(self, path: str, options: ModelOptions) -> HfModel:
        """Load with float32 parameters.

        Raises:
            ConfigError: the folder does not hold a model. EnvironmentNotFit: its documents cannot be packed.
        """
        AttentionInterface.register(ATTENTION, _attend)
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        except (OSError, ValueError) as error:
            raise ConfigError([f"model.path = {path!r} cannot be loaded: {error}"]) from error
        refuse_stateful(model)
        packed = HfModel(model.eval())
        check_packing(packed)
        return packed.to(options.device)


class HfModel(nn.Module):
    """A `PackedModel` around an unmodified transformers model. Evaluation mode throughout: dropout would make the
    trainer's probabilities differ from the engine's."""

    casts = False
    kernels = Kernels()

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.vocab_size = int(hf.get_output_embeddings().weight.shape[0])
        hf.set_attn_implementation(ATTENTION)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.hf.base_model.layers)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        hidden = self.hf.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            packing=batch.packing,
        ).last_hidden_state[0]
        weight = self.hf.get_output_embeddings().weight
        before = hidden.index_select(0, batch.parents)
        logprobs, entropy = logprobs_and_entropy(before, weight, batch.labels, batch.temperatures)
        if batch.predictions is None:
            return logprobs, entropy
        return logprobs.index_select(0, batch.predictions), entropy.index_select(0, batch.predictions)

    def fill(self, place: Place) -> None:
        """Nothing: transformers loads the whole model."""

    def disk_tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        names = list(self._named_tensors())
        if not getattr(self.hf, "_weight_conversions", None):
            for name, tensor in names:
                yield name, gather(tensor.detach())
            return
        from transformers.core_model_loading import revert_weight_conversion

        whole = {name: gather(tensor.detach()) for name, tensor in names}
        yield from revert_weight_conversion(self.hf, whole).items()

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.hf.named_parameters()  # tied weights once
        parameters = {name for name, _ in self.hf.named_parameters(remove_duplicate=False)}
        persistent = set(self.hf.state_dict().keys()) - parameters
        yield from ((name, buffer) for name, buffer in self.hf.named_buffers() if name in persistent)


def refuse_stateful(model: PreTrainedModel) -> None:
    """Raises: EnvironmentNotFit: the model carries something other than attention along the row."""
    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if not model._is_stateful and not kinds:
        return
    why = f"its layers {', '.join(kinds)}" if kinds else "its recurrent state"
    raise EnvironmentNotFit(
        f'model type {config.model_type!r} cannot be trained with impl = "hf": documents packed into one row would '
        f"leak into one another through {why}. Use a model with plain causal attention, or a model plugin for it"
    )


def check_packing(model: HfModel) -> None:
    """Compare two packed documents with transformers' own log-probabilities of each alone.

    Raises:
        EnvironmentNotFit: they differ by more than `TOLERANCE`.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, model.vocab_size, length).astype(np.int32) for length in (5, 7)]
    ids = np.concatenate(documents)
    targets = np.array([1, 2, 3, 4, 6, 7, 8, 9, 10, 11])
    batch = PackedBatch.build(
        ids, np.array([0, 5, 12], np.int32), targets, np.ones(10, np.float32), torch.device("cpu")
    )
    with torch.no_grad():
        packed, _ = model(batch)
        model.hf.set_attn_implementation("eager")
        separate = []
        for document in documents:
            tokens = torch.from_numpy(document.astype(np.int64))
            logits = model.hf(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            separate.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
        model.hf.set_attn_implementation(ATTENTION)
    difference = (packed - torch.cat(separate)).abs().max().item()
    if not difference <= TOLERANCE:
        raise EnvironmentNotFit(
            f'model type {model.hf.config.model_type!r} cannot be trained with impl = "hf": two packed documents give '
            f"log-probabilities that differ from transformers' own by {difference:.3g} (limit {TOLERANCE:g}). Its "
            f"attention mixes documents, or its head is more than a matrix product"
        )


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D]."""
    packing = kwargs.get("packing")
    for extra in ("softcap", "s_aux"):
        if kwargs.get(extra) is not None:
            raise EnvironmentNotFit(
                f'{type(module).__name__} uses {extra!r} in its attention, which impl = "hf" does not have'
            )
    if packing is None or attention_mask is not None or dropout:
        raise EnvironmentNotFit(f"{type(module).__name__} does not hand packed documents to its attention")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return packed_attention(q, k, v, packing, scale, kwargs.get("sliding_window"))[None], None  # type: ignore[arg-type]
