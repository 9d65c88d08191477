"""The contract of a loss: it sees one packed row, returns that row's share of the whole step's sum, and keeps nothing.

Torch comes in through `prl.testing.numerics`, so this module can be imported without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prl.errors import PrlError
from prl.loss import Loss, LossInputs, LossOutputs

if TYPE_CHECKING:
    from torch import Tensor

Make = Callable[[], Loss]

MIXTURES: tuple[tuple[str, ...], ...] = (("rl",), ("ce",), ("rl", "ce"), ("rl", "ref_kl"), ("rl", "ce", "ref_kl"))
"""Component mixtures that are tried. A loss refuses one that it cannot train with a PrlError."""
TOLERANCE = 1e-9
"""Relative, in float64: sums in another order."""


def it_trains_some_component(make: Make) -> None:
    assert list(_accepted(make())), "it refused every mixture of components: rl, ce, rl+ce, rl+ref_kl, rl+ce+ref_kl"


def it_returns_a_finite_scalar_with_a_gradient(make: Make) -> None:
    for inputs in _accepted(make()):
        out = make()(inputs)
        assert isinstance(out, LossOutputs), f"it returned a {type(out).__name__}, not a prl.loss.LossOutputs"
        assert out.loss.ndim == 0, f"the loss has the shape {list(out.loss.shape)}, a scalar is expected"
        gradient = _gradient(out, inputs)
        assert math.isfinite(out.loss.item()), f"the loss is {out.loss.item()}"
        assert bool(gradient.isfinite().all()), "the gradient is not finite"
        assert bool(gradient.any()), "the gradient is zero everywhere, though tokens have weights and advantages"


def tokens_without_weight_have_no_part(make: Make) -> None:
    loss = make()
    for inputs in _accepted(loss):
        unweighted = (inputs.rl_weights == 0) & (inputs.ce_weights == 0) & (inputs.ref_kl_weights == 0)
        before, gradient = _value_and_gradient(loss, inputs)
        assert not bool(gradient[unweighted].any()), "a token whose weights are all 0 has a gradient"
        other = _changed(inputs, unweighted)
        after, _ = _value_and_gradient(loss, other)
        assert after == before, f"changing tokens whose weights are all 0 changed the loss from {before} to {after}"


def rows_add_up(make: Make) -> None:
    """Packing the same documents into other rows changes neither the sum of losses nor any token's gradient."""
    from prl.testing.numerics import assert_parity, pick

    loss = make()
    for inputs in _accepted(loss):
        value, gradient = _value_and_gradient(loss, inputs)
        bounds = inputs.cu_seqlens.tolist()
        for packing in ([[0], [1], [2]], [[0, 1], [2]], [[2, 1, 0]], [[1], [2, 0], []]):
            total = 0.0
            parts: dict[int, Tensor] = {}
            for row in packing:
                part, by_token = _value_and_gradient(loss, pick(inputs, row))
                total += part
                sizes = [bounds[document + 1] - bounds[document] for document in row]
                parts.update(zip(row, by_token.split(sizes) if row else (), strict=True))
            assert math.isclose(total, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (
                f"packed as {packing} the losses add up to {total}, as one row it is {value}: a loss must not average"
            )
            for document, got in parts.items():
                expected = gradient[bounds[document] : bounds[document + 1]]
                assert_parity(expected, got, TOLERANCE, f"gradient of document {document} packed as {packing}")


def denominators_divide(make: Make) -> None:
    loss = make()
    for inputs in _accepted(loss):
        value, _ = _value_and_gradient(loss, inputs)
        doubled = {name: 2 * denominator for name, denominator in inputs.denominators.items()}
        absent = {name for name, denominator in inputs.denominators.items() if denominator == 1.0}
        doubled.update(dict.fromkeys(absent, 1.0))
        half, _ = _value_and_gradient(loss, dataclasses.replace(inputs, denominators=doubled))
        assert math.isclose(2 * half, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (
            f"with all denominators doubled the loss is {half}, half of {value} is expected"
        )


def it_is_finite_at_extremes(make: Make) -> None:
    """Trainer and sampler that disagree by hundreds of nats, in float32: no overflow, no nan."""
    loss = make()
    for inputs in _accepted(loss, double=False):
        for shift in (-500.0, 0.0, 500.0):
            sampler = (inputs.sampler_logprobs + shift).clamp(max=0.0).where(inputs.sampled, inputs.sampler_logprobs)
            logprobs = (inputs.logprobs.detach() - shift).clamp(max=0.0).requires_grad_()
            shifted = dataclasses.replace(inputs, sampler_logprobs=sampler, logprobs=logprobs)
            value, gradient = _value_and_gradient(loss, shifted)
            assert math.isfinite(value) and bool(gradient.isfinite().all()), (
                f"log-ratios of {-2 * shift:g} make the loss {value} and the gradient "
                f"{'finite' if bool(gradient.isfinite().all()) else 'not finite'}"
            )


def it_leaves_its_inputs_alone(make: Make) -> None:
    from prl.testing.numerics import PER_TOKEN

    loss = make()
    for inputs in _accepted(loss):
        copies = {name: getattr(inputs, name).detach().clone() for name in PER_TOKEN}
        denominators = dict(inputs.denominators)
        _value_and_gradient(loss, inputs)
        changed = [name for name, copy in copies.items() if not bool((getattr(inputs, name) == copy).all())]
        assert not changed and inputs.denominators == denominators, f"it changed its inputs: {changed}"


def it_keeps_nothing_between_calls(make: Make) -> None:
    from prl.testing.numerics import loss_row

    loss = make()
    for inputs in _accepted(loss):
        first, _ = _value_and_gradient(loss, inputs)
        components = [name for name, denominator in inputs.denominators.items() if denominator != 1.0]
        _value_and_gradient(loss, loss_row(7, (4, 30), components=components))
        second, _ = _value_and_gradient(loss, inputs)
        assert first == second, f"the same row gave {first}, and after another row {second}"


def metrics_are_sums_and_counts(make: Make) -> None:
    """A pair of numbers without gradient; added over rows they give the same as one row."""
    from prl.testing.numerics import pick

    loss = make()
    for inputs in _accepted(loss):
        whole = _numbers(loss(inputs))
        parts = [_numbers(loss(pick(inputs, row))) for row in ([0, 2], [1])]
        for name, pair in whole.items():
            for index, what in enumerate(("sum", "count")):
                added = sum(part.get(name, (0.0, 0.0))[index] for part in parts)
                assert math.isclose(added, pair[index], rel_tol=1e-6, abs_tol=1e-9), (
                    f"metric {name!r}: the {what} is {pair[index]} for one row, {added} for its documents in two rows"
                )


def _accepted(loss: Loss, *, double: bool = True) -> Iterator[LossInputs]:
    """A row of every mixture that the loss does not refuse."""
    from prl.testing.numerics import loss_row

    for components in MIXTURES:
        inputs = loss_row(components=components, double=double)
        try:
            loss(inputs)
        except PrlError:
            continue
        yield inputs


def _value_and_gradient(loss: Loss, inputs: LossInputs) -> tuple[float, Tensor]:
    out = loss(inputs)
    return float(out.loss.detach()), _gradient(out, inputs)


def _gradient(out: LossOutputs, inputs: LossInputs) -> Tensor:
    from prl.testing.numerics import gradient

    assert out.loss.requires_grad or not inputs.logprobs.numel(), "the loss has no gradient"
    return gradient(out.loss, inputs.logprobs)


def _changed(inputs: LossInputs, where: Tensor) -> LossInputs:
    """Other values, finite but wild, at the tokens `where`."""
    logprobs = inputs.logprobs.detach().masked_fill(where, -30.0).requires_grad_()
    return dataclasses.replace(
        inputs,
        logprobs=logprobs,
        entropy=inputs.entropy.detach().masked_fill(where, 1e6).requires_grad_(),
        sampler_logprobs=inputs.sampler_logprobs.masked_fill(where, -60.0),
        advantages=inputs.advantages.masked_fill(where, 1e6),
    )


def _numbers(out: LossOutputs) -> dict[str, tuple[float, float]]:
    numbers = {}
    for name, pair in out.metrics.items():
        assert isinstance(pair, tuple) and len(pair) == 2, f"metric {name!r} is not a pair (sum, count)"
        assert not any(getattr(value, "requires_grad", False) for value in pair), f"metric {name!r} carries a gradient"
        total, count = (float(value) for value in pair)
        assert math.isfinite(total) and count >= 0, f"metric {name!r} is ({total}, {count})"
        numbers[name] = (total, count)
    return numbers


CHECKS = [
    it_trains_some_component,
    it_returns_a_finite_scalar_with_a_gradient,
    tokens_without_weight_have_no_part,
    rows_add_up,
    denominators_divide,
    it_is_finite_at_extremes,
    it_leaves_its_inputs_alone,
    it_keeps_nothing_between_calls,
    metrics_are_sums_and_counts,
]
