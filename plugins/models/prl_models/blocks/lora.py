"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685).

A layer with adapters is a `LoraLinear` in the place of the `nn.Linear` that it was: same name, same weight, and beside
it the parameters `lora_A` and `lora_B`. Everything else of the model is frozen, and kept in the precision that it is
computed with: what is not trained needs no float32 copy.

    add_adapters      puts them into a model
    adapter_value     what they start with, the same on every rank
    adapted_linear    the product of a layer, or of several that share an input, with its gradients
    merged            the model's parameters as a model without adapters has them
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prl.errors import ConfigError
from prl_models.blocks.join import joined

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class Lora:
    """y = W x + (alpha / rank) B A x, W frozen, for every layer whose last name is among `targets`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


class LoraLinear(nn.Linear):
    """A frozen linear layer [out, in] with lora_A f32[rank, in] and lora_B f32[out, rank]."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    @staticmethod
    def around(layer: nn.Linear, lora: Lora) -> LoraLinear:
        with torch.device("meta"):
            new = LoraLinear(layer.in_features, layer.out_features, layer.bias is not None)
        new.weight, new.bias = layer.weight, layer.bias
        device = layer.weight.device
        new.lora_A = nn.Parameter(torch.empty(lora.rank, layer.in_features, device=device))
        new.lora_B = nn.Parameter(torch.empty(layer.out_features, lora.rank, device=device))
        new.scale = lora.alpha / lora.rank
        return new.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return adapted_linear(input.flatten(0, -2), (self,)).unflatten(0, input.shape[:-1])


def add_adapters(model: nn.Module, blocks: Sequence[nn.Module], lora: Lora, dtype: torch.dtype) -> None:
    """Freeze the model, in `dtype`, and put adapters beside the chosen layers of its blocks. Those that are not on
    `meta` get their first values.

    Raises:
        ConfigError: a target is no layer of the blocks, or the rank is more than a layer has rows or columns.
    """
    found = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and any(layer is inner for block in blocks for inner in block.modules())
    }
    chosen = {name: layer for name, layer in found.items() if _last(name) in lora.targets}
    _check(lora, found, chosen)
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, layer in chosen.items():
        owner, _, last = name.rpartition(".")
        new = LoraLinear.around(layer, lora)
        setattr(model.get_submodule(owner), last, new)
        for key, parameter in ((A, new.lora_A), (B, new.lora_B)):
            if not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(adapter_value(f"{name}.{key}", parameter.shape))


def _check(lora: Lora, found: dict[str, nn.Linear], chosen: dict[str, nn.Linear]) -> None:
    missing = sorted(set(lora.targets) - {_last(name) for name in chosen})
    if missing or not chosen:
        there = ", ".join(sorted({_last(name) for name in found})) or "none"
        what = ", ".join(repr(name) for name in missing) or "nothing"
        raise ConfigError(
            [f"trainer.lora.targets names {what}, but the linear layers of this model's blocks are {there}"]
        )
    name, layer = min(chosen.items(), key=lambda item: min(item[1].weight.shape))
    if lora.rank > min(layer.weight.shape):
        raise ConfigError(
            [
                f"trainer.lora.rank = {lora.rank} is more than {name} has rows or columns, which is "
                f"{layer.out_features} x {layer.in_features}: a rank of at most {min(layer.weight.shape)} fits"
            ]
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return _last(name) in (A, B)


def adapter_value(name: str, shape: Sequence[int]) -> Tensor:
    """What a new adapter holds, f32 on the host, by its name: A uniform within 1 / sqrt(in), as nn.Linear starts, B
    zero, so that nothing changes before the first step."""
    if _last(name) == B:
        return torch.zeros(*shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    bound = shape[1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def adapted_linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Layers that share an input, side by side, with the adapters of those that have any: x [T, in] -> [T, sum of out].
    The layers' own weights are frozen; all of them have a bias, or none."""
    adapted = [layer for layer in layers if isinstance(layer, LoraLinear)]
    down = torch.cat([layer.lora_A for layer in adapted]).to(x.dtype)
    # One product for all layers, whose blocks off the diagonal are zero: a product of 3 x 16 columns takes no longer
    # than one of 16.
    parts = [
        layer.lora_B if isinstance(layer, LoraLinear) else layer.weight.new_empty(layer.out_features, 0)
        for layer in layers
    ]
    up = torch.block_diag(*parts) if len(parts) > 1 else parts[0]
    biases = [layer.bias.to(x.dtype) for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    weights = [layer.weight for layer in layers]
    out: Tensor = _Adapted.apply(x, bias, down, up.to(x.dtype), adapted[0].scale, *weights)
    return out


class _Adapted(torch.autograd.Function):
    """x W^T + bias + scale (x A^T) B^T. Its own, because each sum happens in the product that makes its second half, in
    float32, where autograd would write and read [T, out] and [T, in] once more."""

    @staticmethod
    def forward(ctx, x, bias, down, up, scale, *weights):  # type: ignore[no-untyped-def]
        inner = x @ down.t()
        ctx.save_for_backward(x, down, up, inner, *weights)
        ctx.scale = scale
        return torch.nn.functional.linear(x, joined(weights, x.dtype), bias).addmm_(inner, up.t(), alpha=scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, down, up, inner, *weights = ctx.saved_tensors
        grad_inner = (grad @ up).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ joined(weights, grad.dtype)).addmm_(grad_inner, down)
        grad_up = (grad.t() @ inner).mul_(ctx.scale)
        return grad_x, None, grad_inner.t() @ x, grad_up, None, *[None] * len(weights)


def merged(model: nn.Module, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter of a model as it would be without adapters: W + scale B A, in float32.
    Every rank has to go through all of it."""
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if last in (A, B):
            continue
        whole = gather(parameter.detach())
        layer = model.get_submodule(owner)
        if isinstance(layer, LoraLinear) and last == "weight":
            down, up = gather(layer.lora_A.detach()), gather(layer.lora_B.detach())
            whole = torch.addmm(whole.float(), up.float(), down.float(), alpha=layer.scale)
        yield name, whole


def _last(name: str) -> str:
    return name.rpartition(".")[2]
