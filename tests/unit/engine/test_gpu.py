"""The scheduler on a GPU: the model's own log-probabilities, and new weights in flight."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from prl.messages import Generation
from prl_engine_embedded import fitness, slots
from prl_engine_embedded.fixed import FixedScheduler
from prl_engine_embedded.model import LoadedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def make(kit: Any) -> Any:
    slots.register()
    module = kit.make_module().requires_grad_(False).cuda()
    module.set_attn_implementation(slots.ATTENTION)
    model = LoadedModel(module, torch.device("cuda"), 128)
    fitness.require_plain_attention(model)
    return kit.Runner(kit.track(FixedScheduler(model, 64, 16)))


def difference(runner: Any, prompt: list[int], found: Generation) -> float:
    model = runner.scheduler._model
    with runner.scheduler.hold():
        scored = model.score([prompt + found.token_ids])[0][len(prompt) :]
    return max(abs(a - b) for a, b in zip(scored, found.logprobs))


def test_logprobs_and_weights_in_flight(kit: Any) -> None:
    runner = make(kit)
    requests = [kit.request(index) for index in range(100)]
    for request, found in zip(requests, runner.run(requests)):
        assert difference(runner, request.token_ids, found) < 1e-3
    runner.results.clear()
    running = [kit.request(index, prompt=[3, index % 48], max_tokens=120, stops=[]) for index in range(48)]
    new = kit.make_module(seed=1).state_dict()
    before = runner.scheduler.tokens
    runner.add(running)
    time.sleep(0.1)
    while runner.scheduler.tokens < before + 48 * 10:
        time.sleep(0.001)
    with runner.scheduler.hold():
        runner.scheduler._model.module.load_state_dict(new)
        runner.scheduler.version = 5
        runner.scheduler.weights_changed(True)
    spans = 0
    for request, found in zip(running, runner.wait(*(request.id for request in running))):
        boundary = found.versions.count(0)
        spans += 0 < boundary < 120
        later = Generation(found.token_ids[boundary:], found.logprobs[boundary:], [], "length")
        assert difference(runner, request.token_ids + found.token_ids[:boundary], later) < 1e-3
    assert spans
