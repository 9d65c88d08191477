"""transformers' continuous batching: exact log-probabilities, versions counted at a pause, a scheduler that dies."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from prl import faults
from prl.engine.methods import Failure
from prl.faults import Fault
from prl.messages import Generation
from prl_engine_embedded.build import can_pause
from prl_engine_embedded.config import EmbeddedConfig
from prl_engine_embedded.continuous import ContinuousScheduler

pytestmark = pytest.mark.skipif(not can_pause(), reason="needs transformers 5.19 or newer")


@pytest.fixture
def runner(kit: Any) -> Any:
    loaded = kit.load(attention="sdpa")
    own = EmbeddedConfig(slots=32, cache_tokens=4096)
    return kit.Runner(kit.track(ContinuousScheduler(loaded, own)))


def difference(runner: Any, prompt: list[int], found: Generation, temperature: float = 1.0) -> float:
    """Largest difference to a plain forward pass."""
    ids = torch.tensor([prompt + found.token_ids])
    with runner.scheduler.hold(), torch.no_grad():
        logits = runner.scheduler._model.module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return (expected - torch.tensor(found.logprobs)).abs().max().item()


def test_logprobs_stops_and_limits(kit: Any, runner: Any) -> None:
    requests = [kit.request(index, temperature=(1.0, 0.7, 0.0)[index % 3]) for index in range(24)]
    for request, found in zip(requests, runner.run(requests)):
        assert difference(runner, request.token_ids, found, request.sampling.temperature) < 2e-4
        assert found.versions == [0] * len(found.token_ids)
        assert found.stop_reason == ("stop" if found.token_ids[-1] == kit.STOP else "length")
        assert len(found.token_ids) == 12 or found.stop_reason == "stop"
    assert runner.scheduler.load == 0
    greedy = runner.run([kit.request(100 + index, prompt=[1, 2, 3], temperature=0.0) for index in range(3)])
    assert greedy[0].token_ids == greedy[1].token_ids == greedy[2].token_ids
    refused = runner.run([kit.request(200, prompt=[1] * 128), kit.request(201, top_k=3)])
    assert [failure.reason for failure in refused] == ["context_full", "bad_request"]


@pytest.mark.parametrize("recompute", [True, False])
def test_weights_change_in_flight(kit: Any, runner: Any, recompute: bool) -> None:
    requests = [kit.request(index, prompt=[3, index], max_tokens=100, stops=[]) for index in range(12)]
    new = kit.make_module(seed=1).state_dict()
    processor = runner.scheduler._manager
    runner.add(requests)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with runner.scheduler.hold(), runner.scheduler._model.lock:
            states = processor.batch_processor.scheduler.active_requests.values()
            if len(states) == 12 and min(len(state.generated_tokens) for state in states) >= 5:
                runner.scheduler._model.module.load_state_dict(new)
                runner.scheduler.version = 5
                runner.scheduler.weights_changed(recompute)
                break
        time.sleep(0.002)
    worst = 0.0
    for request, found in zip(requests, runner.wait(*(request.id for request in requests))):
        boundary = found.versions.count(0)
        assert 5 <= boundary < 100
        assert found.versions == [0] * boundary + [5] * (100 - boundary)
        assert len(found.token_ids) == len(found.logprobs) == 100
        later = Generation(found.token_ids[boundary:], found.logprobs[boundary:], [], "length")
        worst = max(worst, difference(runner, request.token_ids + found.token_ids[:boundary], later))
    assert (worst < 2e-4) == recompute


def test_abort_and_hold(kit: Any, runner: Any) -> None:
    with runner.scheduler.hold(), runner.scheduler.hold():
        runner.add([kit.request(index, stops=[]) for index in range(20)])
        runner.scheduler.abort([(runner, f"r{index}") for index in range(0, 20, 2)])
        time.sleep(0.1)
        assert not runner.results
    runner.wait(*(f"r{index}" for index in range(1, 20, 2)))
    assert len(runner.results) == 10
    assert runner.scheduler.load == 0


def test_a_scheduler_that_dies_is_started_again(kit: Any, runner: Any) -> None:
    faults.install("engine", plan=[Fault("engine", "engine.decode", "error", at=3)])
    try:
        found = runner.run([kit.request(index, stops=[]) for index in range(6)])
    finally:
        faults.install("engine", plan=[])
    assert all(isinstance(item, Failure) and item.retryable and not item.reason for item in found)
    runner.results.clear()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        (again,) = runner.run([kit.request(50, stops=[])])
        if isinstance(again, Generation):
            break
        runner.results.clear()
        time.sleep(0.05)
    assert len(again.token_ids) == 12


def test_nan_is_named(kit: Any, runner: Any) -> None:
    with runner.scheduler.hold():
        runner.scheduler._model.module.model.norm.weight.fill_(math.nan)
    found = runner.run([kit.request(index) for index in range(3)])
    assert all(item.reason == "engine_nan" for item in found)
