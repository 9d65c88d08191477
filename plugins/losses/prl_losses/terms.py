"""What the losses of this package share: the cross-entropy component, and refusing what they cannot train."""

from __future__ import annotations

import torch
from torch import Tensor

from prl.errors import RunFailed
from prl.loss import LossInputs

Metrics = dict[str, tuple[Tensor | float, Tensor | float]]


def cross_entropy(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """The `ce` component of a row: sum_t -w_t * logprob_t / denominators["ce"], and its metrics.

    A token without weight is left out before the product, so that its log-probability may be anything, even -inf.
    """
    weights = inputs.ce_weights
    trained = weights != 0
    nll = torch.where(trained, -inputs.logprobs, 0.0)
    loss = (nll * weights).sum() / inputs.denominators.get("ce", 1.0)
    return loss, {"nll": (nll.detach().sum(), trained.sum())}


def refuse(inputs: LossInputs, component: str, loss: str, remedy: str) -> None:
    """A batch with tokens of a component that `loss` does not train must not be half trained in silence.

    Raises:
        RunFailed: the step's denominator counts tokens of `component` (one that has none is absent, 0 or 1).
    """
    denominator = inputs.denominators.get(component, 0.0)
    if denominator > 1:
        raise RunFailed(
            f"the loss {loss!r} does not train the component {component!r}, but this step's batch has it "
            f"(denominator {denominator:g}): {remedy}"
        )
