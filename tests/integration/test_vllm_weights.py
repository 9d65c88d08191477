"""Weights in a real vLLM (`make vllm` makes one for CPUs): after every way of changing them its log-probabilities are
those of a forward pass under the weights that it says made each token.

One engine per model runs all steps; the tests look at what it answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .vllm_runs import EDGE, LENGTHS, VLLM, Ran

pytestmark = pytest.mark.skipif(VLLM != "cpu", reason="no vLLM for CPUs here: `make vllm`")


@pytest.fixture(scope="module", params=["tied", "untied", "moe"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Every step, in an order in which each begins with a whole version."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ran = Ran(request.param, tmp_path_factory.mktemp(request.param))
    for version in range(1, 6):
        ran.add_model(version)
    first_value = "model.layers.1.self_attn.v_proj.weight"
    ran.step("cache", "cache")
    ran.step("nothing before it", "install", ref=ran.publish(10, 1, lacking=first_value))
    ran.step("from the folder", "generate", prompts=ran.prompts, max_tokens=32)
    refs = {version: ran.publish(version, version) for version in range(1, 6)}
    for version in (1, 2, 3):
        ran.step(f"install {version}", "install", ref=refs[version])
        ran.step(f"under {version}", "generate", prompts=ran.prompts, max_tokens=32)
        ran.step(f"cached {version}", "generate", prompts=ran.prompts, max_tokens=32)
    for mode in ("recompute", "retain"):
        ran.step(f"mode {mode}", "swap_kv", mode=mode)
        ran.step(f"{mode} from 3", "install", ref=refs[3])
        ran.step(f"{mode} start", "start", prompts=ran.prompts, max_tokens=250)
        for version, tokens in ((4, 30), (5, 110)):
            ran.step(f"{mode} until {tokens}", "until", tokens=tokens)
            ran.step(f"{mode} to {version}", "install", ref=refs[version])
        ran.step(mode, "finish")
    ran.step("start", "start", prompts=ran.prompts, max_tokens=150)
    ran.step("until", "until", tokens=10)
    ran.step("missing", "install", ref=ran.publish(11, 1, lacking=first_value))
    spoiled = ran.publish(12, 1)
    ran.step("spoiled", "install", ref=spoiled)
    ran.step("untouched", "finish")
    ran.step("doomed start", "start", prompts=ran.prompts, max_tokens=250)
    ran.step("doomed until", "until", tokens=10)
    ran.step("others' probes", "install", ref=ran.publish(13, 1, probes=2))
    ran.step("doomed", "finish")
    ran.step("score after that", "score", sequences=ran.prompts)
    ran.step("plain", "plain_once")
    ran.step("vLLM's own reload", "install", ref=ran.publish(14, 1))
    ran.step("score after vLLM's", "score", sequences=ran.prompts)
    ran.step("ours again", "install", ref=refs[1])
    ran.step("score at the end", "score", sequences=ran.prompts)
    shard = next(Path(spoiled["location"]).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    ran.run()
    yield ran
    torch.set_num_threads(threads)


def test_after_three_publishes_engine_and_forward_pass_agree(ran: Ran) -> None:
    for version in (1, 2, 3):
        assert ran.answers[f"install {version}"]["error"] == ""
        label = f"under {version}"
        assert {v for made in ran.answers[label] for v in made["versions"]} == {version}
        difference = ran.differences(label)
        kl = (difference.exp() - 1 - difference).mean().item()
        assert kl < 1e-6 and difference.abs().max() < EDGE, f"version {version}: k3 {kl:.3g}"
        mean = sum(sum(made["logprobs"]) for made in ran.answers[label]) / len(difference)
        assert mean > -4.5, f"mean log-probability {mean:.2f}: on a nearly uniform distribution, -5.5, nothing shows"


def test_tokens_that_cross_swaps_are_exact_where_the_cache_is_recomputed(ran: Ran) -> None:
    _crossed(ran, "recompute")
    assert ran.differences("recompute").abs().max() < EDGE


def test_tokens_that_cross_swaps_are_those_of_mixed_caches_where_it_is_kept(ran: Ran) -> None:
    _crossed(ran, "retain")
    assert ran.differences("retain", kept_cache=True).abs().max() < EDGE
    assert ran.differences("retain").abs().max() > 0.1, "a kept cache makes a difference, which is not seen here"


def _crossed(ran: Ran, label: str) -> None:
    for made in ran.answers[label]:
        assert sorted(set(made["versions"])) == [3, 4, 5], "every sequence crosses both swaps"
        assert made["versions"] == sorted(made["versions"])


def test_a_prompt_that_was_computed_before_an_update_is_computed_anew(ran: Ran) -> None:
    """T14: as an engine answers that never had other weights."""
    cache = ran.answers["cache"]
    assert cache["prefixes"] and max(LENGTHS) > 2 * cache["block"], "prompts must be cached for this to show anything"
    for version in (1, 2, 3):
        assert ran.differences(f"cached {version}").abs().max() < EDGE


def test_an_incomplete_first_version_leaves_the_folder_it_was_started_with(ran: Ran) -> None:
    answer = ran.answers["nothing before it"]
    assert "too little for model.layers.1.self_attn.qkv_proj" in answer["error"] and not answer["ended"]
    assert {v for made in ran.answers["from the folder"] for v in made["versions"]} == {0}
    assert ran.differences("from the folder").abs().max() < EDGE


def test_weights_that_are_not_whole_change_nothing_not_even_for_requests_in_flight(ran: Ran) -> None:
    assert "v_proj.weight is missing" in ran.answers["missing"]["error"]
    assert "corrupted" in ran.answers["spoiled"]["error"]
    assert all(ran.answers[label]["version"] == 5 for label in ("missing", "spoiled"))
    assert {v for made in ran.answers["untouched"] for v in made["versions"]} == {5}
    assert ran.differences("untouched").abs().max() < EDGE


def test_probes_that_disagree_fail_what_is_in_flight_and_the_former_version_is_whole(ran: Ran) -> None:
    answer = ran.answers["others' probes"]
    assert "the probes do not agree" in answer["error"] and answer["version"] == 5 and not answer["ended"]
    assert all(made.get("retryable") and "not verified" in made["error"] for made in ran.answers["doomed"])
    assert ran.score_differences("score after that", 5).max() < EDGE


def test_vllms_own_reload_is_caught_where_it_corrupts(ran: Ran) -> None:
    """On a CPU it breaks tied embeddings and MoE; what it leaves intact is installed."""
    answer = ran.answers["vLLM's own reload"]
    if ran.kind == "untied":
        assert answer["error"] == "" and answer["version"] == 14
        assert ran.score_differences("score after vLLM's", 1).max() < EDGE
    else:
        assert "the probes do not agree" in answer["error"] and answer["version"] == 5 and not answer["ended"]
        assert ran.score_differences("score after vLLM's", 5).max() < EDGE
    assert ran.answers["ours again"]["error"] == "" and ran.score_differences("score at the end", 1).max() < EDGE


def test_vllm_does_not_warn_of_layers_that_are_due_nothing(ran: Ran) -> None:
    """Of tables of rotary embeddings, and of a tied head; in every load, that of the folder too."""
    assert "Failed to load weights" not in (ran.folder / "log").read_text()
