"""Weights in vLLM on a GPU: every channel that one host has, a quantised engine, a version that is put back.

In bfloat16 a log-probability is 1e-2 from a float32 forward pass; weights that are not what was sent are 1 from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .vllm_runs import VLLM, Ran

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(VLLM != "cuda", reason="no vLLM for GPUs here")]

ROOM = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
"""Of each engine, so that none measures what is free while others start beside it."""
NEAR = {"": 0.06, "fp8": 0.4}
"""Of the mean |difference| of log-probabilities, by quantisation."""
ENGINES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "tied", "channel": "cuda_ipc"},
    "untied": {"kind": "untied", "channel": "cuda_ipc", "table": {"encoding": "delta"}},
    "moe": {"kind": "moe", "channel": "shm"},
    "fp8": {"kind": "untied", "channel": "cuda_ipc", "quantization": "fp8"},
}


@pytest.fixture(scope="module", params=sorted(ENGINES))
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    given = ENGINES[request.param]
    device = "cuda" if given["channel"] == "cuda_ipc" else "cpu"
    folder = tmp_path_factory.mktemp(request.param)
    ran = Ran(folder=folder, **given, device=device, tolerance=0.15, dtype="bfloat16", **ROOM)
    for version in (1, 2, 3):
        ran.add_model(version)
        ran.step(f"install {version}", "install", ref=ran.publish(version, version))
        ran.step(f"under {version}", "generate", prompts=ran.prompts, max_tokens=64)
    ran.step("start", "start", prompts=ran.prompts, max_tokens=250)
    ran.step("until", "until", tokens=30)
    ran.step("install 4", "install", ref=ran.publish(4, 1))
    ran.step("crossing", "finish")
    ran.models[4] = ran.models[1]
    ran.step("others' probes", "install", ref=ran.publish(5, 2, probes=3))
    ran.step("score", "score", sequences=ran.prompts)
    ran.run()
    yield ran


def _limit(ran: Ran) -> float:
    return NEAR[str(ran.arguments.get("quantization", ""))]


def _near(ran: Ran, label: str) -> bool:
    return bool(ran.differences(label).abs().mean() < _limit(ran))


def test_every_version_is_what_was_sent(ran: Ran) -> None:
    for version in (1, 2, 3):
        assert ran.answers[f"install {version}"]["error"] == ""
        assert _near(ran, f"under {version}"), f"{ran.differences(f'under {version}').abs().mean():.3g}"


def test_a_sequence_crosses_a_swap(ran: Ran) -> None:
    assert {v for made in ran.answers["crossing"] for v in made["versions"]} == {3, 4}
    assert _near(ran, "crossing"), f"{ran.differences('crossing').abs().mean():.3g}"


def test_a_version_whose_probes_disagree_is_put_back(ran: Ran) -> None:
    answer = ran.answers["others' probes"]
    assert "the probes do not agree" in answer["error"] and answer["version"] == 4 and not answer["ended"]
    assert ran.score_differences("score", 4).mean() < _limit(ran)
