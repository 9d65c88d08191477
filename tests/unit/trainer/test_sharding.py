"""What is sharded, and what stays whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prl_trainer_fsdp.parallel import sharding


@pytest.mark.parametrize("memory, small", [(4000, True), (3999, False)])
def test_a_model_is_small_up_to_a_twentieth_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, memory: int, small: bool
) -> None:
    """100 parameters of 2 bytes."""
    found = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    model = nn.Linear(10, 10, bias=False)
    assert sharding._is_small(model, torch.device("cuda", 0), torch.bfloat16) is small


def test_on_a_cpu_no_model_is_small() -> None:
    assert not sharding._is_small(nn.Linear(1, 1), torch.device("cpu"), torch.float32)
