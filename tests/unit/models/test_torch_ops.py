"""The reference operations and the products of linear layers: gradients, and the formulas written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.testing.numerics import assert_parity
from prl_models.blocks.linear import fused_linear, linear
from prl_models.blocks.torch_ops import TorchOps

OPS = TorchOps()
EPS = 1e-5


def double(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers rotates the first dimensions of a head."""
    size = 2 * cos.shape[-1]
    wide_cos, wide_sin = (torch.cat([angle, angle], -1)[:, None] for angle in (cos, sin))
    part, rest = x[..., :size], x[..., size:]
    half = torch.cat([-part[..., size // 2 :], part[..., : size // 2]], -1)
    return torch.cat([part * wide_cos + half * wide_sin, rest], -1)


def test_norms() -> None:
    x, residual, weight = double(5, 8, seed=0), double(5, 8, seed=1), double(8, seed=2)
    assert_parity(normed(x, weight), OPS.rms_norm(x, weight, EPS), 1e-12)
    out, total = OPS.add_rms_norm(x, residual, weight, EPS)
    assert_parity(normed(x + residual, weight), out, 1e-12)
    assert torch.equal(total, x + residual)
    assert torch.autograd.gradcheck(partial(OPS.rms_norm, eps=EPS), (x, weight))
    assert torch.autograd.gradcheck(partial(OPS.add_rms_norm, eps=EPS), (x, residual, weight))
    for index in (0, 1):  # also where one of the two results is not used
        assert torch.autograd.gradcheck(lambda *args, i=index: OPS.add_rms_norm(*args, EPS)[i], (x, residual, weight))


@pytest.mark.parametrize("rotary", [2, 3], ids=["part of a head", "whole heads"])
@pytest.mark.parametrize("weights", [True, False])
def test_qkv(weights: bool, rotary: int) -> None:
    heads, kv_heads, size = 3, 1, 6
    qkv = double(4, (heads + 2 * kv_heads) * size, seed=0)
    angles = torch.rand(4, rotary, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    q_weight, k_weight = (double(size, seed=1), double(size, seed=2)) if weights else (None, None)

    def plain(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), 1)
        if q_weight is not None and k_weight is not None:
            q, k = normed(q, q_weight), normed(k, k_weight)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def own(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, ...]:
        return OPS.qkv_norm_rope(qkv, heads, kv_heads, q_weight, k_weight, EPS, cos, sin)

    for name, expected, found in zip("qkv", plain(qkv, q_weight, k_weight), own(qkv, q_weight, k_weight), strict=True):
        assert_parity(expected, found, 1e-12, name)
    assert torch.autograd.gradcheck(own, (qkv, q_weight, k_weight))


def test_swiglu() -> None:
    gate_up = double(5, 12, seed=0)
    assert_parity(F.silu(gate_up[:, :6]) * gate_up[:, 6:], OPS.swiglu(gate_up), 1e-12)
    assert torch.autograd.gradcheck(OPS.swiglu, (gate_up,))


@pytest.mark.parametrize("in_one", [True, False], ids=["joined, as on a GPU", "apart, as on a CPU"])
@pytest.mark.parametrize("bias", [True, False])
def test_products_side_by_side(bias: bool, in_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl_models.blocks.linear._in_one", lambda x: in_one)
    torch.manual_seed(0)
    layers = [nn.Linear(5, size, bias=bias, dtype=torch.float64) for size in (4, 2, 3)]
    x = double(6, 5, seed=0)
    expected = torch.cat([layer(x) for layer in layers], 1)
    found = fused_linear(x, layers)
    assert_parity(expected, found, 1e-12)
    assert torch.equal(linear(x, layers[0]), layers[0](x))
    weight = torch.randn_like(expected)
    inputs = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for reference, value in zip(wanted, torch.autograd.grad((found * weight).sum(), inputs), strict=True):
        assert_parity(reference, value, 1e-12)


def test_products_in_another_precision_give_gradients_in_the_weights_own() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, size) for size in (8, 8)]
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    out = fused_linear(x, layers)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[:, :8], F.linear(x, layers[0].weight.bfloat16(), layers[0].bias.bfloat16()))
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for layer in layers for p in layer.parameters())


def test_frozen_weights_get_no_gradient() -> None:
    layers = [nn.Linear(4, 2, bias=False), nn.Linear(4, 3, bias=False)]
    layers[0].requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    fused_linear(x, layers).sum().backward()
    assert layers[0].weight.grad is None and layers[1].weight.grad is not None and x.grad is not None


def test_layers_with_and_without_bias_are_no_one_product() -> None:
    with pytest.raises(ValueError, match="all have a bias, or none"):
        fused_linear(torch.randn(2, 4), [nn.Linear(4, 2), nn.Linear(4, 2, bias=False)])


def test_no_copy_of_the_weights_is_kept_for_the_backward_pass() -> None:
    """In bfloat16 it would be a second model, and under FSDP one that is never freed."""
    layers = [nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)]
    kept: list[Tensor] = []
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fused_linear(x, layers)
    own = {x.data_ptr(), *(layer.weight.data_ptr() for layer in layers)}
    assert {tensor.data_ptr() for tensor in kept} <= own
