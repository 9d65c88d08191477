"""Matrix products of a model's linear layers: float32 weights cast at their use, several layers in one product.

Every linear layer of a family is an `nn.Linear` that only these two functions call; one with adapters (`lora.py`) is a
`LoraLinear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl_models.blocks.join import joined
from prl_models.blocks.lora import LoraLinear, adapted_linear


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """x [T, in] -> [T, out], in x's precision."""
    return fused_linear(x, (module,))


def fused_linear(x: Tensor, modules: Sequence[nn.Linear]) -> Tensor:
    """The outputs of layers that share an input, side by side: x [T, in] -> [T, sum of out], in x's precision.

    Raises:
        ValueError: some of the layers have a bias and some do not.
    """
    biases = [module.bias for module in modules if module.bias is not None]
    if biases and len(biases) != len(modules):
        raise ValueError("layers of one product must all have a bias, or none")
    if any(isinstance(module, LoraLinear) for module in modules):
        return adapted_linear(x, modules)
    out: Tensor = _Products.apply(x, len(modules), *(module.weight for module in modules), *biases)
    return out


class _Products(torch.autograd.Function):
    """x W^T + b for several W. On a GPU one product of the joined weights: joining takes 6 us for layers of width
    1,024 (H200), less than what smaller products lose. On a CPU one product each, into its place of the output: there
    joining costs more than it saves."""

    @staticmethod
    def forward(ctx, x, count, *parameters):  # type: ignore[no-untyped-def]
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [bias.dtype for bias in biases]
        cast = [bias.to(x.dtype) for bias in biases]
        if count == 1 or _in_one(x):
            return F.linear(x, joined(weights, x.dtype), torch.cat(cast) if cast else None)
        rows = [len(weight) for weight in weights]
        out = x.new_empty(x.shape[0], sum(rows))
        for index, part in enumerate(out.split(rows, dim=1)):
            weight = weights[index].to(x.dtype).t()
            if cast:
                torch.addmm(cast[index], x, weight, out=part)
            else:
                torch.mm(x, weight, out=part)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        count = len(weights)
        needs_x, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2 : 2 + count]
        rows = [len(weight) for weight in weights]
        parts = grad.split(rows, dim=1)
        grad_x = _grad_input(grad, parts, weights) if needs_x else None
        grad_weights: list[Tensor | None]
        if _in_one(grad) and all(needs_weight):
            grad_weights = list(_product(grad.t(), x, weights[0].dtype).split(rows))
        else:
            trios = zip(needs_weight, parts, weights, strict=True)
            grad_weights = [_product(part.t(), x, w.dtype) if needed else None for needed, part, w in trios]
        grad_biases = [part.sum(0).to(dtype) for part, dtype in zip(parts, ctx.bias_dtypes, strict=False)]
        return grad_x, None, *grad_weights, *grad_biases


def _in_one(x: Tensor) -> bool:
    return x.is_cuda


def _grad_input(grad: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    if len(weights) == 1 or _in_one(grad):
        return grad @ joined(weights, grad.dtype)
    out = parts[0] @ weights[0].to(grad.dtype)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addmm_(part, weight.to(grad.dtype))
    return out


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`. On a GPU its sums, which are float32, are written as they are."""
    if a.is_cuda and dtype == torch.float32 and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
