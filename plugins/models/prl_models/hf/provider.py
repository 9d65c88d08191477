"""The provider `hf`: a model class of transformers as it is, with packed attention and the chunked head around it.

Packing works through `AttentionInterface.register`: transformers hands `attend`, a keyword of ours, down to every
attention layer, and there ranks share rows too (Ulysses or a ring). It is safe only where nothing else mixes tokens. So
`fitness` refuses models with a state along the row, with sparse attention or with soft caps by name, and whatever is
loaded must reproduce transformers' own log-probabilities of two separate documents when both are packed into one row;
that also finds a head with a bias or a scale, which the chunked head does not apply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from prl.contribution import PluginConfig
from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.batch import PackedBatch
from prl_models.blocks.attention import Padded
from prl_models.blocks.context import ContextParallel, attend
from prl_models.blocks.head import logprobs_and_entropy
from prl_models.blocks.kernel import AttentionKernel
from prl_models.blocks.lora import add_adapters, merged
from prl_models.hf.fitness import check_packing, longest_document, refuse, window_of
from prl_models.kernels import choose_attention
from prl_models.options import AttentionName, Kernels, ModelOptions
from prl_models.provider import Gather, Place
from prl_models.weights import WeightFiles

log = logging.getLogger(__name__)

ATTENTION = "prl_packed"
GROUPED_BYTES = 16
"""torch's grouped product wants rows of a multiple of so many bytes."""


def build(config: PluginConfig) -> HfProvider:
    return HfProvider()


class HfProvider:
    def load(self, path: str, options: ModelOptions) -> HfModel:
        """Load with float32 parameters; on the host where ranks will share them, which move their shards themselves;
        on the device `meta` without any values.

        Raises:
            ConfigError: the folder does not hold a model, its heads cannot be divided among the ranks of a row, or
                operations are asked for by name.
            EnvironmentNotFit: its documents cannot be packed, or the kernel that is asked for cannot be used.
        """
        AttentionInterface.register(ATTENTION, _attend)
        if options.kernels.operations not in ("auto", "torch"):
            raise ConfigError(
                [
                    f'trainer.kernels.operations = "{options.kernels.operations}", but this model runs by '
                    'transformers\' own code, which has operations of its own: leave it at "auto"'
                ]
            )
        if options.device.type == "meta":
            return skeleton(path, options)
        try:
            config = AutoConfig.from_pretrained(path)
            refuse(config, options.context)
            kernel = _choose_kernel(config, options)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        except (OSError, ValueError) as error:
            raise ConfigError([f"model.path = {path!r} cannot be loaded: {error}"]) from error
        choose_experts(model, options.dtype)
        packed = HfModel(model.eval(), kernel, options.context)
        check_packing(packed)
        if options.lora is not None:
            add_adapters(packed.hf, packed.blocks, options.lora, options.dtype)
        return packed if options.deferred else packed.to(options.device)


def _choose_kernel(config: PreTrainedConfig, options: ModelOptions) -> AttentionKernel:
    """Raises: EnvironmentNotFit: the attention kernel that is asked for cannot be used."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if (latent := getattr(text, "qk_nope_head_dim", None)) is not None:  # multi-head latent attention
        head_dim = latent + text.qk_rope_head_dim
    windows = window_of(text) is not None
    return choose_attention(options.kernels.attention, options.device, options.dtype, head_dim, windows=windows)[0]


class HfModel(nn.Module):
    """A `PackedModel` around an unmodified transformers model. Evaluation mode throughout: dropout would make the
    trainer's probabilities differ from the engine's."""

    casts = False

    def __init__(self, hf: PreTrainedModel, kernel: AttentionKernel, context: ContextParallel | None) -> None:
        super().__init__()
        self.hf = hf
        self.vocab_size = int(hf.get_output_embeddings().weight.shape[0])
        self.context = context
        self.kernel = kernel
        self.kernels = Kernels(cast(AttentionName, kernel.name), "torch")
        self.longest = longest_document(hf.config.get_text_config())
        hf.set_attn_implementation(ATTENTION)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers, whatever the class calls their list."""
        number = self.hf.config.get_text_config().num_hidden_layers
        lists = (module for module in self.hf.base_model.modules() if isinstance(module, nn.ModuleList))
        return next(list(modules) for modules in lists if len(modules) == number)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        return self._predict(batch, self.kernel, self.context)

    def check(self, batch: PackedBatch, context: ContextParallel | None) -> tuple[Tensor, Tensor]:
        """As forward, in float32 on any device."""
        return self._predict(batch, None, context)

    def takes_attention(self) -> bool:
        """Whether transformers takes attention from its registry; a model with its own only logs that it does not."""
        self.hf.set_attn_implementation(ATTENTION)
        return bool(self.hf.config.get_text_config()._attn_implementation == ATTENTION)

    def _predict(
        self, batch: PackedBatch, kernel: AttentionKernel | None, context: ContextParallel | None
    ) -> tuple[Tensor, Tensor]:
        if self.longest is not None and batch.packing.max_length > self.longest:
            raise EnvironmentNotFit(
                f"a document has {batch.packing.max_length} tokens, and beyond {self.longest} transformers chooses the "
                "frequencies of this model's rotary embedding by the longest document of a row: the others would be "
                "embedded otherwise than alone. Keep documents shorter (trainer.row_tokens bounds them)"
            )
        hidden = self.hf.base_model(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            attend=partial(attend, packing=batch.packing, kernel=kernel, context=context),
        ).last_hidden_state[0]
        weight = self.hf.get_output_embeddings().weight
        before = hidden.index_select(0, batch.parents)
        logprobs, entropy = logprobs_and_entropy(before, weight, batch.labels, batch.temperatures)
        if batch.predictions is None:
            return logprobs, entropy
        return logprobs.index_select(0, batch.predictions), entropy.index_select(0, batch.predictions)

    def fill(self, place: Place) -> None:
        """Nothing: transformers loads the whole model."""

    @contextmanager
    def stored(self) -> Iterator[Callable[[str], Tensor]]:
        """One tensor at a time where names in memory and on disk are the same; otherwise of the whole model."""
        path = self.hf.config._name_or_path
        if not getattr(self.hf, "_weight_conversions", None):
            files = WeightFiles.find(path)
            known = dict(self.hf.state_dict())
            kept = {name: known[name].shape for name, _ in self._named_tensors(lambda tensor: tensor)}
            files.check(kept, (), [name for name in known if name not in kept])
            with files.reading() as read:
                yield lambda name: read(name).float()
            return
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        yield whole.state_dict().__getitem__

    def disk_tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        tensors = self._named_tensors(gather)
        if not getattr(self.hf, "_weight_conversions", None):
            yield from tensors
            return
        from transformers.core_model_loading import revert_weight_conversion

        for _, layer in groupby(tensors, lambda pair: _layer(pair[0])):
            yield from revert_weight_conversion(self.hf, dict(layer)).items()

    def _named_tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        yield from merged(self.hf, gather)  # tied weights once
        parameters = {name for name, _ in self.hf.named_parameters(remove_duplicate=False)}
        persistent = set(self.hf.state_dict().keys()) - parameters
        yield from ((name, gather(buffer)) for name, buffer in self.hf.named_buffers() if name in persistent)


def skeleton(path: str, options: ModelOptions) -> HfModel:
    """The model that config.json describes, on the device `meta`.

    Raises:
        ConfigError: it describes none.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path = {path!r}: config.json describes no model: {error}"]) from error
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    packed = HfModel(model.eval(), Padded(), options.context)
    if options.lora is not None:
        add_adapters(packed.hf, packed.blocks, options.lora, options.dtype)
    return packed


def choose_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Mixtures of experts run as grouped products where their rows allow it, else expert by expert."""
    experts = [p for module in model.modules() for p in module.parameters(recurse=False) if p.ndim == 3]
    misfits = [p.shape[-1] for p in experts if p.shape[-1] * dtype.itemsize % GROUPED_BYTES]
    if misfits and model.get_experts_implementation()[""] == "grouped_mm":
        log.warning(
            f"experts are computed one by one: a grouped product in {dtype} needs rows of a multiple of "
            f"{GROUPED_BYTES // dtype.itemsize} values, and theirs have {misfits[0]}"
        )
        model.set_experts_implementation("eager")


def _layer(name: str) -> str:
    """The part of a parameter's name up to the first number: what is of one layer stands together."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attend: Callable[..., Tensor] | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, E] ->
    [1, T, heads, E]. Values narrower than keys (multi-head latent attention) are widened by zeros for the kernel."""
    for extra in ("softcap", "s_aux"):
        if kwargs.get(extra) is not None:
            raise EnvironmentNotFit(
                f'{type(module).__name__} uses {extra!r} in its attention, which impl = "hf" does not have'
            )
    if attend is None or attention_mask is not None or dropout:
        raise EnvironmentNotFit(f"{type(module).__name__} does not hand packed documents to its attention")
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - width))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(q, k, v, scale=scale, window=sliding_window)[None, :, :, :width], None
