"""Cross entropy: supervised training on tokens that somebody else wrote.

    L = sum_t -w_t * log pi(t) / N,      w = ce_weights, N = denominators["ce"]

N is the sum of the weights of the whole update: with weight 1 this is the token mean, and other weights give the other
aggregations (1/length: the mean over sequences).
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
