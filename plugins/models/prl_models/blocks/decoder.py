"""A decoder made from a `DecoderSpec`: a `PackedModel` whose parameters are named as in transformers.

A row's tokens stand in one dimension, [T, H]; there is no batch. Weights are float32 and cast where they are used. What
a layer adds to the residual stream and the stream itself go from layer to layer apart, so that every addition is done
inside the norm that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl_models.batch import PackedBatch
from prl_models.blocks.context import ContextParallel, attend
from prl_models.blocks.head import logprobs_and_entropy
from prl_models.blocks.kernel import AttentionKernel
from prl_models.blocks.linear import fused_linear, linear
from prl_models.blocks.lora import adapter_value, is_adapter, merged
from prl_models.blocks.ops import Ops
from prl_models.blocks.packing import Packing
from prl_models.blocks.rope import Rope
from prl_models.conversion import Rule, from_disk, to_disk
from prl_models.family import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec
from prl_models.options import Kernels
from prl_models.provider import Gather, Place
from prl_models.weights import WeightFiles

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a row's positions, [T, R / 2]."""


@dataclass(frozen=True)
class Compute:
    """What a decoder computes with."""

    ops: Ops
    attention: AttentionKernel | None = None
    context: ContextParallel | None = None
    dtype: torch.dtype = torch.float32
    kernels: Kernels = field(default_factory=Kernels)


class Norm(nn.Module):
    """The weight of an RMS norm; `Ops` compute it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class Attention(nn.Module):
    def __init__(self, spec: AttentionSpec, hidden: int, eps: float, compute: Compute) -> None:
        super().__init__()
        self.spec, self.eps, self.compute = spec, eps, compute
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(width, hidden, bias=spec.out_bias)
        if spec.qk_norm == "head":
            self.q_norm, self.k_norm = Norm(spec.head_dim), Norm(spec.head_dim)

    def forward(self, x: Tensor, angles: Angles, packing: Packing) -> Tensor:
        spec, compute = self.spec, self.compute
        qkv = fused_linear(x, (self.q_proj, self.k_proj, self.v_proj))
        normed = spec.qk_norm == "head"
        q_weight, k_weight = (self.q_norm.weight, self.k_norm.weight) if normed else (None, None)
        q, k, v = compute.ops.qkv_norm_rope(
            qkv, spec.heads, spec.kv_heads, q_weight, k_weight, self.eps, angles[0], angles[1]
        )
        scale = spec.head_dim**-0.5
        out = attend(q, k, v, packing, scale, spec.window, compute.attention, compute.context)
        return linear(out.flatten(1), self.o_proj)


class Dense(nn.Module):
    def __init__(self, spec: DenseSpec, hidden: int, compute: Compute) -> None:
        super().__init__()
        self.compute = compute
        self.gate_proj = nn.Linear(hidden, spec.intermediate, bias=spec.bias)
        self.up_proj = nn.Linear(hidden, spec.intermediate, bias=spec.bias)
        self.down_proj = nn.Linear(spec.intermediate, hidden, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = fused_linear(x, (self.gate_proj, self.up_proj))
        return linear(self.compute.ops.swiglu(gate_up), self.down_proj)


class Layer(nn.Module):
    """`recomputed`: only its inputs are kept for the backward pass, so that one is better than two."""

    recomputed = False

    def __init__(self, spec: LayerSpec, hidden: int, eps: float, compute: Compute) -> None:
        super().__init__()
        self.eps, self.ops = eps, compute.ops
        self.self_attn = Attention(spec.attention, hidden, eps, compute)
        self.mlp = Dense(spec.mlp, hidden, compute)
        self.input_layernorm = Norm(hidden)
        self.post_attention_layernorm = Norm(hidden)

    def forward(self, x: Tensor, residual: Tensor | None, angles: Angles, packing: Packing) -> tuple[Tensor, Tensor]:
        """The stream is x + residual, before and after; without a residual it is x."""
        if residual is None:
            residual = x
            x = self.ops.rms_norm(x, self.input_layernorm.weight, self.eps)
        else:
            x, residual = self.ops.add_rms_norm(x, residual, self.input_layernorm.weight, self.eps)
        x = self.self_attn(x, angles, packing)
        x, residual = self.ops.add_rms_norm(x, residual, self.post_attention_layernorm.weight, self.eps)
        return self.mlp(x), residual


class Backbone(nn.Module):
    def __init__(self, spec: DecoderSpec, compute: Compute, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden, spec.padding)
        self.layers = nn.ModuleList(Layer(layer, spec.hidden, spec.norm_eps, compute) for layer in spec.layers)
        self.norm = Norm(spec.hidden)
        self.rotary_emb = Rope(spec.rope, device)


class Decoder(nn.Module):
    """Made on `meta`: `fill` gives it values."""

    casts = True

    def __init__(
        self, spec: DecoderSpec, rules: Sequence[Rule], compute: Compute, device: torch.device, files: WeightFiles
    ) -> None:
        super().__init__()
        self.spec, self.rules, self.compute, self.device = spec, rules, compute, device
        self.kernels = compute.kernels
        self.vocab_size = spec.vocab_size
        self._files: WeightFiles | None = files
        with torch.device("meta"):
            self.model = Backbone(spec, compute, device)
            if not spec.tied:
                self.lm_head = nn.Linear(spec.hidden, spec.vocab_size, bias=False)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        hidden = self.hidden_states(batch).index_select(0, batch.parents)
        head = self.model.embed_tokens if self.spec.tied else self.lm_head
        fused = self.compute.ops.name != "torch"
        logprobs, entropy = logprobs_and_entropy(hidden, head.weight, batch.labels, batch.temperatures, fused=fused)
        if batch.predictions is None:
            return logprobs, entropy
        return logprobs.index_select(0, batch.predictions), entropy.index_select(0, batch.predictions)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """[U, H] after the last norm."""
        model, dtype = self.model, self.compute.dtype
        x = F.embedding(batch.token_ids, model.embed_tokens.weight, model.embed_tokens.padding_idx).to(dtype)
        angles = model.rotary_emb(batch.position_ids, dtype)
        residual: Tensor | None = None
        for layer in model.layers:
            if residual is not None and layer.recomputed:
                x, residual = residual + x, None
            x, residual = layer(x, residual, angles, batch.packing)
        if residual is None:
            return self.compute.ops.rms_norm(x, model.norm.weight, self.spec.norm_eps)
        return self.compute.ops.add_rms_norm(x, residual, model.norm.weight, self.spec.norm_eps)[0]

    @torch.no_grad()
    def fill(self, place: Place) -> None:
        """Raises: ConfigError: a weight file cannot be read."""
        if self._files is None:
            return
        names = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        self.to_empty(device=self.device)
        self.model.rotary_emb = Rope(self.spec.rope, self.device)
        with self._files.reading() as read:
            for name in names:
                parameter = self.get_parameter(name)
                if is_adapter(name):
                    whole = adapter_value(name, parameter.shape)
                else:
                    whole = from_disk(name, parameter.shape, self.rules, read)
                parameter.copy_(place(whole, parameter))
        self._files = None

    @contextmanager
    def stored(self) -> Iterator[Callable[[str], Tensor]]:
        assert self._files is not None, "its values were filled in"
        shapes = {name: tensor.shape for name, tensor in self.state_dict().items()}
        with self._files.reading() as read:
            yield lambda name: from_disk(name, shapes[name], self.rules, read)

    def disk_tensors(self, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        for name, whole in merged(self, gather):
            yield from to_disk(name, whole, self.rules)
