"""Cross entropy: supervised training on tokens that somebody else wrote.

    L = sum_t -w_t * log pi(t) / N,      w = ce_weights, N = denominators["ce"]

With N the number of weighted tokens of the whole step this is the token mean; other denominators give the other
aggregations.
"""

from __future__ import annotations

from prl.loss import Loss, LossInputs, LossOutputs
from prl_losses.config import CeConfig
from prl_losses.terms import cross_entropy, refuse


def cross_entropy_loss(inputs: LossInputs) -> LossOutputs:
    """Raises:
    RunFailed: the batch carries policy-gradient tokens, which this loss would ignore.
    """
    refuse(inputs, "rl", "ce", 'set [loss] use = "dppo" for reinforcement learning')
    loss, metrics = cross_entropy(inputs)
    return LossOutputs(loss, metrics)


def build(config: CeConfig) -> Loss:
    return cross_entropy_loss
