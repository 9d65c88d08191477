"""DPPO: a policy gradient whose trust region is a difference of probabilities, not a ratio.

For a trained token with advantage A, trainer probability pi, sampler probability mu, r = pi / mu:

    drop = (A > 0 and pi - mu > delta_high) or (A <= 0 and pi - mu < -delta_low)
    l    = -(0 if drop else adv_tau * A * r) + kl_tau * (log r)^2
    L    = sum_t rl_weight_t * l_t / denominators["rl"]  +  the `ce` component

* The mask is the binary total-variation mask of "Rethinking the Trust Region in LLM Reinforcement Learning" (Qi et
  al. 2026, arXiv 2602.04879, section 4): |pi - mu| is the total variation between the two policies once every token
  but the sampled one is merged into one event. A rare token whose ratio is large moves little probability and is kept;
  PPO's ratio clip drops it.
* mu is what the engine said when it sampled the token, so the mask also covers the difference between engine and
  trainer. Only moves away from mu in the direction that the advantage pushes are dropped: the way back stays open.
* The ratio is neither detached nor clipped: its gradient, A * r * grad log pi, is the importance-weighted policy
  gradient.
* The regulariser is the k2 estimator of the divergence up to its factor 1/2 (Schulman 2020, "Approximating KL
  Divergence"), in the place it has in Kimi k1.5 (arXiv 2501.12599, section 2.3.2). It holds for dropped tokens too.
* Denominators are sums of the component's weights over the whole update: with weight 1 on every trained token, the loss
  is a token mean.

Numerics: log r is clamped to +-20 against overflow alone; e^20 = 4.9e8 keeps even the square of a gradient norm inside
float32 (3e38). Past it the gradient is zero, for ratio and regulariser alike; no healthy run comes near.
"""

from __future__ import annotations

import torch

from prl.loss import Loss, LossInputs, LossOutputs
from prl_losses.config import DppoConfig
from prl_losses.terms import Metrics, cross_entropy, refuse

MAX_LOG_RATIO = 20.0


class Dppo:
    def __init__(self, config: DppoConfig) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Raises:
        RunFailed: the batch carries `ref_kl` weights, which need a reference policy.
        """
        refuse(
            inputs, "ref_kl", "dppo", "choose an algorithm without ref_kl weights, or a loss with a reference policy"
        )
        config = self.config
        weights = torch.where(inputs.sampled, inputs.rl_weights, 0.0)
        trained = weights != 0
        # Selected before any arithmetic: outside the mask log-probabilities may be anything, and 0 * inf is nan.
        logprobs = torch.where(trained, inputs.logprobs, 0.0)
        sampler_logprobs = torch.where(trained, inputs.sampler_logprobs, 0.0)
        advantages = torch.where(trained, inputs.advantages, 0.0)

        log_ratio = (logprobs - sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        with torch.no_grad():
            moved = logprobs.exp() - sampler_logprobs.exp()
            up = advantages > 0
            dropped_high = trained & up & (moved > config.delta_high)
            dropped_low = trained & ~up & (moved < -config.delta_low)
            kept = ~(dropped_high | dropped_low)
        gain = config.adv_tau * advantages * log_ratio.exp()
        per_token = config.kl_tau * log_ratio.square() - torch.where(kept, gain, 0.0)
        policy = (per_token * weights).sum() / inputs.denominators.get("rl", 1.0)

        supervised, metrics = cross_entropy(inputs)
        with torch.no_grad():
            count = trained.sum()
            ratio = log_ratio.exp()
            policy_metrics: Metrics = {
                "policy_loss": (per_token.sum(), count),
                "ratio": (torch.where(trained, ratio, 0.0).sum(), count),
                "kl": ((ratio - log_ratio - 1.0).sum(), count),
                "dropped": ((~kept).sum(), count),
                "dropped_high": (dropped_high.sum(), count),
                "dropped_low": (dropped_low.sum(), count),
                "entropy": (torch.where(trained, inputs.entropy, 0.0).sum(), count),
            }
        return LossOutputs(policy + supervised, {**policy_metrics, **metrics})


def build(config: DppoConfig) -> Loss:
    return Dppo(config)
