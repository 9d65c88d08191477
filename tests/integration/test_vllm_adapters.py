"""Adapters in a real vLLM (`make vllm` makes one for CPUs): each version is served as a LoRA of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prl_engine_vllm.adapters import arguments

from . import vllm_models as models
from .vllm_runs import EDGE, VLLM, Ran

pytestmark = pytest.mark.skipif(VLLM != "cpu", reason="no vLLM for CPUs here: `make vllm`")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ran = Ran("untied", tmp_path_factory.mktemp("adapters"), **arguments(models.ADAPTER, 1))
    refs = {version: ran.publish_adapter(version, seed=version) for version in (1, 2, 3, 4, 5)}
    wrong = ran.publish_adapter(6, seed=6, probes=1)
    ran.step("before", "generate", prompts=ran.prompts, max_tokens=32)
    for version in (1, 2, 3):
        ran.step(f"install {version}", "install", ref=refs[version])
        ran.step(f"under {version}", "generate", prompts=ran.prompts, max_tokens=32)
    ran.step("start", "start", prompts=ran.prompts, max_tokens=200)
    ran.step("until", "until", tokens=20)
    ran.step("install 4", "install", ref=refs[4])
    ran.step("until again", "until", tokens=60)
    ran.step("loaded then", "adapters")
    ran.step("crossing", "finish")
    ran.step("under 4", "generate", prompts=ran.prompts, max_tokens=32)
    ran.step("install 6", "install", ref=wrong)
    ran.step("score", "score", sequences=ran.prompts)
    ran.step("install 5", "install", ref=refs[5])
    ran.step("under 5", "generate", prompts=ran.prompts, max_tokens=32)
    ran.step("loaded", "adapters")
    ran.run()
    yield ran
    torch.set_num_threads(threads)


def test_every_version_is_the_merged_model(ran: Ran) -> None:
    assert ran.differences("before").abs().max() < EDGE
    for version in (1, 2, 3, 4, 5):
        answer = ran.answers[f"install {version}"]
        assert answer["error"] == "" and answer["version"] == version
        assert answer["swap_stall_s"] == 0, "nothing is paused"
        assert {v for made in ran.answers[f"under {version}"] for v in made["versions"]} == {version}
        assert ran.differences(f"under {version}").abs().max() < EDGE


def test_requests_in_flight_end_under_the_version_they_began_with(ran: Ran) -> None:
    assert {v for made in ran.answers["crossing"] for v in made["versions"]} == {3}
    assert ran.differences("crossing").abs().max() < EDGE
    assert len(ran.answers["loaded then"]) == 2 and len(ran.answers["loaded"]) == 1, "what nobody uses is unloaded"


def test_adapters_whose_probes_disagree_are_not_served(ran: Ran) -> None:
    answer = ran.answers["install 6"]
    assert "the probes do not agree" in answer["error"] and answer["version"] == 4 and not answer["ended"]
    assert ran.score_differences("score", 4).max() < EDGE
