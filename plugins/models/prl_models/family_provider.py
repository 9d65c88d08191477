"""The provider of a family: from a Hugging Face folder to a `Decoder`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.errors import ConfigError, EnvironmentNotFit
from prl_models.blocks.context import check_heads
from prl_models.blocks.decoder import Compute, Decoder
from prl_models.blocks.lora import add_adapters
from prl_models.family import DecoderSpec, Family
from prl_models.kernels import choose
from prl_models.options import ModelOptions
from prl_models.weights import WeightFiles

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class FamilyProvider:
    def __init__(self, family: Family) -> None:
        self.family = family

    def load(self, path: str, options: ModelOptions) -> Decoder:
        """
        Raises:
            ConfigError: the folder does not hold the model that its config.json describes, or its heads or windows do
                not allow the ranks to share a row.
            EnvironmentNotFit: the family does not have what the config asks for.
        """
        spec = self.family.spec(load_config(path))
        if options.context is not None:
            size, style = options.context.size, options.context.style
            for layer in (layer.attention for layer in spec.layers):
                check_heads(layer.heads, layer.kv_heads, size, style, layer.window)
        files = WeightFiles.find(path)
        model = Decoder(spec, self.family.rules, compute(options, spec), options.device, files)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        computed = [name for name in files.where if name.endswith("rotary_emb.inv_freq")]
        files.check(shapes, self.family.rules, [*computed, HEAD] if spec.tied else computed)
        if spec.tied and HEAD in files.where:
            _check_tied(files)
        if options.lora is not None:
            add_adapters(model, model.blocks, options.lora, options.dtype)
        if not options.deferred:
            model.fill(_whole)
        return model


def compute(options: ModelOptions, spec: DecoderSpec) -> Compute:
    """Raises: EnvironmentNotFit: kernels that are asked for cannot be used."""
    attention = [layer.attention for layer in spec.layers]
    head_dim = max(one.head_dim for one in attention)
    windows = any(one.window is not None for one in attention)
    chosen = choose(options.kernels, options.device, options.dtype, head_dim, windows=windows)
    return Compute(chosen.ops, chosen.attention, options.context, options.dtype, chosen.kernels)


def load_config(path: str) -> Any:
    """Raises: ConfigError: transformers cannot read the config."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path = {path!r}: config.json cannot be read: {error}"]) from error


def _check_tied(files: WeightFiles) -> None:
    with files.reading() as read:
        if EMBEDDING in files.where and not torch.equal(read(HEAD), read(EMBEDDING)):
            raise EnvironmentNotFit(
                f"{files.path!r} has tie_word_embeddings = true, but {HEAD!r} and {EMBEDDING!r} differ on disk"
            )


def _whole(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device)
