"""Matrix products of a model's linear layers: float32 weights cast at their use, several layers in one product.

Every linear layer of a family is an `nn.Linear` that only these two functions call; one with adapters (`lora.py`) is a
`LoraLinear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl_models.blocks.lora import LoraLinear, adapted_linear


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """x [..., in] -> [..., out], in x's precision."""
    bias = None if module.bias is None else module.bias.to(x.dtype)
    if isinstance(module, LoraLinear):
        return adapted_linear(x, module.weight.to(x.dtype), bias, (module,))
    return F.linear(x, module.weight.to(x.dtype), bias)


def fused_linear(x: Tensor, modules: Sequence[nn.Linear]) -> Tensor:
    """The outputs of layers that share an input, side by side: x [..., in] -> [..., sum of out].

    One product instead of several smaller ones: on an H200 the copy that puts the weights of a 1024-wide layer
    together takes 6 us, less than what three products lose.
    """
    weight = _SideBySide.apply(x.dtype, *(module.weight for module in modules))
    biases = [module.bias for module in modules if module.bias is not None]
    bias = None
    if biases:
        assert len(biases) == len(modules), "layers in one product have all a bias or none"
        bias = torch.cat(biases).to(x.dtype)
    if any(isinstance(module, LoraLinear) for module in modules):
        return adapted_linear(x, weight, bias, modules)
    return F.linear(x, weight, bias)


class _SideBySide(torch.autograd.Function):
    """[out_i, in] each -> [sum of out_i, in] in another precision, in one pass over the weights."""

    @staticmethod
    def forward(ctx, dtype, *weights):  # type: ignore[no-untyped-def]
        ctx.rows, ctx.dtype = [len(weight) for weight in weights], weights[0].dtype
        out = weights[0].new_empty(sum(ctx.rows), weights[0].shape[1], dtype=dtype)
        for part, weight in zip(out.split(ctx.rows), weights, strict=True):
            part.copy_(weight)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return None, *(part.to(ctx.dtype) for part in grad.split(ctx.rows))
