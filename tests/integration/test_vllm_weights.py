"""Weights in a real vLLM (`make vllm` makes one for CPUs): after every way of changing them its log-probabilities are
those of a forward pass under the weights that it says made each token.

One engine per model runs all steps in a process of its own; the tests look at what it answered.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from prl import foreign, registry
from prl.protocols import Probe
from prl_engine_vllm import interpreter
from prl_engine_vllm.config import VllmConfig

from . import vllm_models as models

LIMIT_S = 300
TOLERANCE = 1e-4
LENGTHS = (5, 9, 16, 100)
PYTHON = interpreter.choose(VllmConfig())
EDGE = 1e-5
"""Of one log-probability in float32; measured are 3e-6 at most."""

pytestmark = pytest.mark.skipif(PYTHON is None, reason="no Python with vLLM here: `make vllm`")


class Ran:
    """What one engine answered, by the label of the step, and the models behind its versions."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.models = {version: models.make(kind, version) for version in range(6)}
        self.tensors = {version: models.disk_tensors(m, folder / f"{version}") for version, m in self.models.items()}
        self._sender = registry.build("channels", "filesystem").sender(folder / "channel")
        self._labels: list[str] = []
        self._steps: list[tuple[str, dict[str, Any]]] = []
        generator = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(1, models.VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
        self.answers: dict[str, Any] = {}

    def publish(self, version: int, tensors: int, *, lacking: str = "", probes: int | None = None) -> dict[str, Any]:
        """The weights of model `tensors` as `version`; `probes` are another model's, `lacking` is left out."""
        sent = {name: tensor for name, tensor in self.tensors[tensors].items() if name != lacking}
        said: list[Probe] = models.probes(self.models[tensors if probes is None else probes])
        found: dict[str, Any] = msgspec.to_builtins(self._sender.send(version, 0, iter(sent.items()), said, TOLERANCE))
        return found

    def step(self, label: str, name: str, **keywords: Any) -> None:
        self._labels.append(label)
        self._steps.append((name, keywords))

    def run(self) -> None:
        request = {
            "arguments": {
                "model": str(self.folder / "0"), "dtype": "float32", "max_model_len": 400, "enforce_eager": True,
                "skip_tokenizer_init": True, "scheduling_policy": "priority", "max_num_seqs": 32, "block_size": 32,
                "disable_log_stats": True, "logprobs_mode": "processed_logprobs", "num_gpu_blocks_override": 256,
            },
            "channel": ["filesystem", {"visibility_s": 0.1}],
            "steps": self._steps,
        }  # fmt: skip
        asked, answered, log = self.folder / "asked.json", self.folder / "answered.json", self.folder / "log"
        asked.write_text(json.dumps(request))
        links = self.folder / "packages"
        foreign.link(links, ["prl-core", "prl-engine-vllm", "prl-channels"])
        here = Path(__file__).parent
        environment = {
            **foreign.variables(links), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        environment["PYTHONPATH"] += f"{os.pathsep}{here}"
        command = [str(PYTHON), str(here / "vllm_driver.py"), str(asked), str(answered)]
        with log.open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(LIMIT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        assert code == 0, log.read_text()[-4000:]
        self.answers = dict(zip(self._labels, json.loads(answered.read_text())["answers"], strict=True))

    def differences(self, label: str, *, kept_cache: bool = False) -> torch.Tensor:
        """f64[tokens]: the forward pass's log-probability minus the engine's, for every token of a step's answers."""
        found: list[float] = []
        for prompt, made in zip(self.prompts, self.answers[label], strict=True):
            tokens, versions = made["tokens"], made["versions"]
            expected = models.replay(self.models, prompt, tokens, versions) if kept_cache else self._exact(prompt, made)
            found += [theirs - ours for theirs, ours in zip(expected, made["logprobs"], strict=True)]
        return torch.tensor(found, dtype=torch.float64)

    def _exact(self, prompt: Sequence[int], made: dict[str, Any]) -> list[float]:
        whole = [*prompt, *made["tokens"]]
        by_version = {v: models.forward(self.models[v], whole)[len(prompt) - 1 :] for v in set(made["versions"])}
        return [by_version[version][index] for index, version in enumerate(made["versions"])]

    def score_differences(self, label: str, version: int) -> float:
        """Largest difference between a step's scores and the model of `version`."""
        found = [
            abs(ours - theirs)
            for prompt, scores in zip(self.prompts, self.answers[label], strict=True)
            for ours, theirs in zip(scores[1:], models.forward(self.models[version], prompt), strict=True)
        ]
        return max(found)


@pytest.fixture(scope="module", params=["tied", "untied", "moe"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Every step, in an order in which each begins with a whole version."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ran = Ran(request.param, tmp_path_factory.mktemp(request.param))
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
    assert ran.score_differences("score after that", 5) < EDGE


def test_vllms_own_reload_is_caught_where_it_corrupts(ran: Ran) -> None:
    """On a CPU it breaks tied embeddings and MoE; what it leaves intact is installed."""
    answer = ran.answers["vLLM's own reload"]
    if ran.kind == "untied":
        assert answer["error"] == "" and answer["version"] == 14
        assert ran.score_differences("score after vLLM's", 1) < EDGE
    else:
        assert "the probes do not agree" in answer["error"] and answer["version"] == 5 and not answer["ended"]
        assert ran.score_differences("score after vLLM's", 5) < EDGE
    assert ran.answers["ours again"]["error"] == "" and ran.score_differences("score at the end", 1) < EDGE
