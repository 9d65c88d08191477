"""What a family of models is: a spec of its decoder, read from a Hugging Face config, and the names of its weights.

A family is a short declarative file (`llama/`, `qwen3/`). Its `spec` says what the shared blocks are made of, or it
refuses, by name, a feature of the config that they do not have: then `model.impl = "auto"` takes transformers' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prl.errors import EnvironmentNotFit
from prl_models.blocks.rope import RopeSpec, rope_spec
from prl_models.conversion import Rule


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), scores scaled by head_dim ** -0.5.

    Args:
        qk_norm: "head": an RMS norm over every head of queries and keys, before the rotation.
        qkv_bias, out_bias: of the products before and after.
        window: a query sees at most this many keys, its own included; None: all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: Literal["none", "head"] = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None


@dataclass(frozen=True)
class DenseSpec:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    intermediate: int
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: AttentionSpec
    mlp: DenseSpec


@dataclass(frozen=True)
class DecoderSpec:
    """
    Args:
        norm_eps: of every norm.
        tied: the head's weight is the embedding's.
        padding: the token whose embedding is never trained, as in transformers.
    """

    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    tied: bool
    padding: int | None = None


class Family(Protocol):
    """`name` is what messages call it; `rules` turn names in memory, which are transformers', into names on disk."""

    name: str

    @property
    def rules(self) -> Sequence[Rule]: ...

    def spec(self, config: Any) -> DecoderSpec:
        """Of a `PretrainedConfig`.

        Raises:
            EnvironmentNotFit: the config asks for something that the blocks do not have.
        """
        ...


_ELSEWHERE = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "no_rope_layers",
    "num_experts",
    "num_local_experts",
    "quantization_config",
)
"""Keys of other architectures: in a config of a dense one they announce something that would be left out."""


def require(config: Any, **allowed: tuple[Any, ...]) -> None:
    """Every key that the config has must hold one of the values given for it, and no key of another architecture may
    hold anything.

    Raises:
        EnvironmentNotFit: naming the first that does not.
    """
    for key, values in {**allowed, **{key: (None,) for key in _ELSEWHERE if key not in allowed}}.items():
        value = getattr(config, key, values[0])
        if value not in values:
            known = " or ".join(repr(choice) for choice in values)
            raise EnvironmentNotFit(
                f"model type {config.model_type!r} with {key} = {value!r} is not implemented: it has {known}"
            )


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer, by `layer_types`.

    Raises:
        EnvironmentNotFit: a layer is neither full nor sliding attention.
    """
    kinds = list(config.layer_types)
    foreign = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if foreign:
        raise EnvironmentNotFit(
            f"model type {config.model_type!r} with layers {', '.join(foreign)} is not implemented: it has "
            f"full_attention and sliding_attention"
        )
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def dense_decoder(config: Any, attention: Sequence[AttentionSpec], mlp_bias: bool = False) -> DecoderSpec:
    """A decoder of dense layers with one kind of head, by the keys that such configs share."""
    mlp = DenseSpec(config.intermediate_size, mlp_bias)
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden=config.hidden_size,
        layers=tuple(LayerSpec(layer, mlp) for layer in attention),
        rope=rope_spec(config, attention[0].head_dim),
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        padding=config.pad_token_id,
    )
