"""Numerics for tests: agreement to a relative tolerance, and random inputs. The only module of the core with torch.

* `assert_parity`: one tensor against a reference, with a message that says where and by how much they differ.
* `assert_same_bits`: nothing may differ, not even the sign of a zero.
* `sharpen`: makes a random model peaked enough for a comparison to fail.
* `loss_row`, `pick`: packed rows for a loss.
* `random_tensors`: weights of every dtype and shape that a channel must carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from prl.loss import LossInputs

PER_TOKEN = (
    "logprobs",
    "entropy",
    "sampler_logprobs",
    "advantages",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "sampled",
    "versions",
)
"""The fields of `LossInputs` with one value per token."""


def relative_error(reference: Tensor, value: Tensor) -> float:
    """max |value - reference| / max |reference|, in float64; against an all-zero reference the absolute error."""
    if reference.shape != value.shape:
        raise AssertionError(f"shapes differ: {tuple(value.shape)}, expected {tuple(reference.shape)}")
    if reference.numel() == 0:
        return 0.0
    expected, got = reference.detach().double().cpu(), value.detach().double().cpu()
    scale = expected.abs().max().item() or 1.0
    return (got - expected).abs().max().item() / scale


def assert_parity(reference: Tensor, value: Tensor, rtol: float, what: str = "value") -> None:
    """`value` agrees with `reference` to `rtol` of the reference's largest magnitude.

    Relative to the largest, not to each element: float32 sums of cancelling terms are exact to the terms' size.
    nan never agrees.
    """
    error = relative_error(reference, value)
    if error <= rtol:
        return
    expected, got = reference.detach().double().cpu(), value.detach().double().cpu()
    difference = (got - expected).abs().nan_to_num(nan=float("inf"))
    at = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    raise AssertionError(
        f"{what}: relative error {error:.3g} exceeds {rtol:.3g}; worst at {list(at)}: {got[at].item():.9g}, "
        f"expected {expected[at].item():.9g}"
    )


def assert_same_bits(reference: Mapping[str, Tensor], value: Mapping[str, Tensor], what: str = "tensors") -> None:
    """Two sets of named tensors have the same names, dtypes, shapes and bits."""
    missing, extra = sorted(reference.keys() - value.keys()), sorted(value.keys() - reference.keys())
    assert not missing and not extra, f"{what}: missing {missing}, unexpected {extra}"
    for name, expected in reference.items():
        got = value[name]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (
            f"{what}: {name!r} is {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
        if not torch.equal(_bits(expected), _bits(got)):
            different = int((_bits(expected) != _bits(got)).sum())
            raise AssertionError(f"{what}: {name!r} differs in {different} of {expected.nbytes} bytes")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def sharpen(model: nn.Module, factor: float) -> None:
    """Multiply every matrix: a model of random weights gives nearly uniform distributions, on which nothing differs."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    """What a model may consist of: matrices, tied and transposed ones, scalars, empty ones, all common dtypes."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 8, generator=random)
    return {
        "model.embed.weight": weight,
        "lm_head.weight": weight,
        "model.layers.0.down.weight": torch.randn(5, 7, generator=random).T,
        "model.layers.0.norm.weight": torch.randn(9, generator=random).to(torch.bfloat16),
        "model.layers.0.gate": torch.randn(2, 3, 4, generator=random).to(torch.float16),
        "model.scale": torch.randn((), generator=random),
        "model.steps": torch.randint(0, 9, (3,), generator=random),
        "model.mask": torch.rand(5, generator=random) > 0.5,
        "model.unused": torch.zeros(0, 4),
    }


def gradient(value: Tensor, wrt: Tensor) -> Tensor:
    """d value / d wrt; zeros where `value` does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(wrt)
    (result,) = torch.autograd.grad(value, wrt, allow_unused=True, materialize_grads=True, retain_graph=True)
    return result


def loss_row(
    seed: int = 0,
    lengths: Sequence[int] = (7, 5, 9),
    *,
    components: Sequence[str] = ("rl",),
    double: bool = True,
    drift: float = 0.1,
) -> LossInputs:
    """A packed row of documents of `lengths` tokens as a trainer would make it: a prompt, then sampled tokens.

    Args:
        components: those with weights and a denominator. `ce` weighs prompts, the others sampled tokens.
        double: float64, in which sums agree whatever their order; float32 is what a trainer uses.
        drift: how far log-probabilities of trainer and sampler differ, in nats.
    """
    total, dtype = sum(lengths), torch.float64 if double else torch.float32
    random = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(total, generator=random, dtype=dtype)

    position = torch.cat([torch.arange(length) for length in lengths]) if lengths else torch.arange(0)
    sampled = position >= 2
    sampler = torch.where(sampled, -0.05 - 2.0 * uniform(), 0.0)
    logprobs = torch.where(sampled, sampler + drift * (2.0 * uniform() - 1.0), -3.0 * uniform())
    logprobs = torch.where(position == 0, 0.0, logprobs)
    weights = {
        "rl": torch.where(sampled, 0.5 + uniform(), 0.0),
        "ce": torch.where((position == 1) | (position == 3), 0.5 + uniform(), 0.0),
        "ref_kl": torch.where(sampled, 0.5 + uniform(), 0.0),
    }
    used = {name: weight if name in components else torch.zeros_like(weight) for name, weight in weights.items()}
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        entropy=uniform().requires_grad_(),
        sampler_logprobs=sampler,
        advantages=2.0 * uniform() - 1.0,
        rl_weights=used["rl"],
        ce_weights=used["ce"],
        ref_kl_weights=used["ref_kl"],
        sampled=sampled,
        versions=torch.where(sampled, 3, -1).int(),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        version=3,
        denominators={name: float(weight.sum()) or 1.0 for name, weight in used.items()},
    )


def pick(inputs: LossInputs, documents: Sequence[int]) -> LossInputs:
    """A row of some of a row's documents, in the order given; denominators stay those of the whole step."""
    bounds = inputs.cu_seqlens.tolist()
    chosen = [torch.arange(bounds[document], bounds[document + 1]) for document in documents]
    index = torch.cat(chosen) if chosen else torch.arange(0)
    fields = {name: getattr(inputs, name).detach()[index] for name in PER_TOKEN}
    for name in ("logprobs", "entropy"):
        fields[name].requires_grad_()
    ends = torch.tensor([0, *(len(part) for part in chosen)], dtype=torch.int32).cumsum(0).int()
    return dataclasses.replace(inputs, **fields, cu_seqlens=ends)
