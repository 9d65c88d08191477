"""What an engine makes of the trainer's probes, and what several ranks or engines found as one."""

from __future__ import annotations

import math

import pytest
import torch

from prl.engine.probes import check, k3, pooled, worst
from prl.errors import WeightsError
from prl.messages import Installed
from prl.protocols import Probe


def test_the_kl_is_of_sampled_tokens_and_the_difference_of_all() -> None:
    probes = [Probe([5, 6, 7, 8], [0.0, -1.0, -2.0, -3.0], first=2), Probe([5, 6], [0.0, -1.0])]
    found = check(probes, [[0.0, -1.5, -2.25, -3.0], [0.0, -0.9]], 1.0)
    assert found.probe_tokens == 3
    # e^d - 1 - d of d = trainer minus engine: 0.25, 0 and -0.1
    wanted = (math.exp(0.25) - 1.25 + math.exp(-0.1) - 0.9) / 3
    assert found.probe_kl == pytest.approx(wanted, rel=1e-12)
    assert found.probe_difference == pytest.approx((0.5 + 0.25 + 0.0 + 0.1) / 4)


def test_probes_of_which_nothing_was_sampled_say_nothing_of_a_kl() -> None:
    assert check([Probe([5, 6], [0.0, -1.0], first=2)], [[0.0, -1.5]], 1.0) == Installed(0, 0.0, 0.5)
    assert check([], [], 0.0) == Installed()


@pytest.mark.parametrize("found", [-1.2, math.nan, math.inf])
def test_probes_that_do_not_agree_are_an_error(found: float) -> None:
    with pytest.raises(WeightsError, match=r"on rank 1: mean \|difference\| .* over 2 tokens, allowed is 0\.05"):
        check([Probe([5, 6, 7], [0.0, -1.0, -1.0])], [[0.0, found, -1.0]], 0.05, " on rank 1")


def test_ranks_are_pooled_by_their_tokens_and_of_engines_the_worst_counts() -> None:
    assert pooled([Installed(100, 0.001, 0.1), Installed(300, 0.005, 0.3)]) == Installed(400, 0.004, 0.2)
    assert worst([Installed(100, 0.001, 0.4), Installed(300, 0.005, 0.3)]) == Installed(300, 0.005, 0.4)
    assert pooled([]) == worst([]) == Installed()


@pytest.mark.parametrize("difference", [0.0, 1e-5, -0.05, 0.7, -30.0, 45.0])
def test_it_is_the_estimator_of_training(difference: float) -> None:
    from prl_trainer_fsdp.metrics import _MAX_DIFFERENCE, StepMetrics
    from prl_trainer_fsdp.parallel.runtime import Runtime

    metrics = StepMetrics(Runtime(0, 1, torch.device("cpu")))
    bounded = torch.tensor([difference], dtype=torch.float64).clamp(-_MAX_DIFFERENCE, _MAX_DIFFERENCE)
    metrics._add_difference("mismatch", bounded, torch.ones(1, dtype=torch.bool))
    assert k3(difference) == pytest.approx(metrics.reduce()["mismatch/kl"], rel=1e-12)
