"""REINFORCE with truncated importance sampling.

For a trained token with advantage A, trainer probability pi and sampler probability mu:

    l = -min(pi / mu, max_weight) * A * log pi          the weight without gradient
    L = sum_t rl_weight_t * l_t / denominators["rl"]

Williams 1992 for the estimator; Ionides 2008, "Truncated Importance Sampling", section 2, for the cut: it bounds the
variance and biases towards the sampler. Unlike a clipped ratio, no token loses its gradient.
"""

from __future__ import annotations

import torch

from acme_reinforce.config import ReinforceConfig
from prl.errors import RunFailed
from prl.loss import LossInputs, LossOutputs

MAX_LOG_RATIO = 20.0
"""Only against overflow: `max_weight` cuts far below e^20."""


class Reinforce:
    def __init__(self, config: ReinforceConfig) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Raises:
        RunFailed: the batch has tokens to imitate (`ce`) or a reference policy, which this loss would ignore.
        """
        for component in ("ce", "ref_kl"):
            if inputs.denominators.get(component, 0.0) > 1:
                raise RunFailed(f"the loss 'reinforce_tis' does not train the component {component!r}")
        weights = torch.where(inputs.sampled, inputs.rl_weights, 0.0)
        trained = weights != 0
        # Elsewhere log-probabilities may be anything, and 0 * inf is nan: select before any arithmetic.
        logprobs = torch.where(trained, inputs.logprobs, 0.0)
        advantages = torch.where(trained, inputs.advantages, 0.0)
        with torch.no_grad():
            log_ratio = logprobs - torch.where(trained, inputs.sampler_logprobs, 0.0)
            ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
            importance = ratio.clamp(max=self.config.max_weight)
        per_token = -importance * advantages * logprobs
        loss = (per_token * weights).sum() / inputs.denominators.get("rl", 1.0)
        with torch.no_grad():
            count = trained.sum()
            cut = (trained & (ratio > self.config.max_weight)).sum()
            entropy = torch.where(trained, inputs.entropy, 0.0).sum()
        return LossOutputs(loss, {"cut": (cut, count), "entropy": (entropy, count)})
