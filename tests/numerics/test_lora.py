"""Adapters against their formula written out, and a layer that has them against the merged one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prl.testing.numerics import assert_parity
from prl_models.blocks.head import logprobs_and_entropy
from prl_models.blocks.linear import fused_linear, linear
from prl_models.blocks.lora import Lora, LoraLinear, merged

LORA = Lora(rank=3, alpha=7.0, targets=())


def layer(out: int, seed: int, *, bias: bool, adapted: bool) -> nn.Linear:
    torch.manual_seed(seed)
    plain = nn.Linear(16, out, bias=bias)
    plain.requires_grad_(False)
    if not adapted:
        return plain
    made = LoraLinear.around(plain, LORA)
    with torch.no_grad():
        made.lora_A.normal_()
        made.lora_B.normal_()
    return made


def written_out(x: Tensor, layers: list[nn.Linear], adapters: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """W x + bias + (alpha / rank) B (A x), each product by itself."""
    parts = []
    for index, module in enumerate(layers):
        bias = None if module.bias is None else module.bias.to(x.dtype)
        part = F.linear(x, module.weight.to(x.dtype), bias)
        if index in adapters:
            down, up = adapters[index]
            part = part + LORA.alpha / LORA.rank * F.linear(F.linear(x, down), up)
        parts.append(part)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapted", [(True,), (True, True, True), (True, False, True), (False, True)])
def test_outputs_and_gradients_are_those_of_the_formula(adapted: tuple[bool, ...], bias: bool) -> None:
    layers = [layer(8 + 4 * i, i, bias=bias, adapted=has) for i, has in enumerate(adapted)]
    torch.manual_seed(9)
    x, grad = torch.randn(5, 16, requires_grad=True), torch.randn(5, sum(m.out_features for m in layers))
    out = linear(x, layers[0]) if len(layers) == 1 else fused_linear(x, layers)
    out.backward(grad)
    exact = x.detach().double().requires_grad_()
    adapters = {
        i: (m.lora_A.detach().double().requires_grad_(), m.lora_B.detach().double().requires_grad_())
        for i, m in enumerate(layers)
        if isinstance(m, LoraLinear)
    }
    expected = written_out(exact, layers, adapters)
    expected.backward(grad.double())
    assert_parity(expected.float(), out, 1e-6, "out")
    assert x.grad is not None and exact.grad is not None
    assert_parity(exact.grad.float(), x.grad, 1e-6, "x")
    for i, (down, up) in adapters.items():
        module = layers[i]
        assert isinstance(module, LoraLinear) and down.grad is not None and up.grad is not None
        assert module.lora_A.grad is not None and module.lora_B.grad is not None
        assert_parity(down.grad.float(), module.lora_A.grad, 1e-6, f"A of {i}")
        assert_parity(up.grad.float(), module.lora_B.grad, 1e-6, f"B of {i}")
    assert all(m.weight.grad is None for m in layers)


def test_more_than_one_leading_dimension_and_an_input_without_gradient() -> None:
    module = layer(8, 0, bias=True, adapted=True)
    x = torch.randn(2, 3, 16)
    out = module(x)
    assert out.shape == (2, 3, 8)
    assert_parity(linear(x.flatten(0, 1), module), out.flatten(0, 1), 0, "shape")
    out.sum().backward()
    assert isinstance(module, LoraLinear) and module.lora_A.grad is not None


def test_a_merged_layer_computes_what_the_adapters_add() -> None:
    model = nn.Sequential(layer(8, 0, bias=True, adapted=True), layer(8, 1, bias=False, adapted=False))
    found = dict(merged(model, lambda tensor: tensor))
    assert list(found) == ["0.weight", "0.bias", "1.weight"]
    x = torch.randn(4, 16)
    assert_parity(model[0](x), F.linear(x, found["0.weight"], found["0.bias"]), 1e-6, "merged")
    assert torch.equal(found["1.weight"], model[1].weight)


def test_bfloat16_sums_in_float32_before_it_rounds() -> None:
    module = layer(8, 0, bias=False, adapted=True)
    assert isinstance(module, LoraLinear)
    x = torch.randn(64, 16).bfloat16()
    out = linear(x, module)
    down, up = module.lora_A.detach().bfloat16(), module.lora_B.detach().bfloat16()
    adapters = {0: (down.double(), up.double())}
    rounded = nn.Linear(16, 8, bias=False)
    rounded.weight.data = module.weight.bfloat16().float()
    exact = written_out(x.double(), [rounded], adapters)
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert out.dtype == torch.bfloat16 and error < 2e-2


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [8, 4])
def test_a_frozen_head_computes_no_gradient_of_its_weight(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(32, 16)
    targets, ones = torch.arange(8), torch.ones(8)
    products, gradients = [], []
    for trained in (True, False):
        logprobs, entropy = logprobs_and_entropy(hidden, weight.requires_grad_(trained), targets, ones, chunk)
        with Products() as counted:
            (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad is not None and (weight.grad is not None) == trained
        gradients.append(hidden.grad)
        hidden.grad = weight.grad = None
        products.append(counted.count)
    assert torch.equal(gradients[0], gradients[1])
    assert products[0] - products[1] == 8 // chunk
