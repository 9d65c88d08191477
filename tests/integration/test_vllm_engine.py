"""The vLLM engine as a process of its own, with a real vLLM: `make vllm` makes one for CPUs. One for all tests here."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from prl import foreign, registry
from prl.engine.client import WireEngineClient
from prl.errors import EpisodeFailed, WireError
from prl.messages import GenerateRequest, WeightsRef
from prl.protocols import EngineClient, Probe
from prl.testing.contracts import engine as contract
from prl.types import Sampling
from prl_engine_vllm.config import VllmConfig
from prl_engine_vllm.interpreter import REMEDY, choose

from .listening import listening
from .vllm_server import TOKEN, Load, VllmServer, make_model

PYTHON = choose(VllmConfig())
pytestmark = pytest.mark.skipif(PYTHON is None, reason=f"no vLLM here: {REMEDY}")

EXACT = 1e-5
"""Between vLLM's log-probabilities and transformers' in float32; 3e-6 was measured."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("vllm")
    server = VllmServer(folder, make_model(folder / "model"))
    try:
        yield server.wait()
    finally:
        server.stop()


def request(name: str, prompt: list[int], count: int, *, temperature: float = 1.0, seed: int = 0) -> GenerateRequest:
    return GenerateRequest(name, prompt, Sampling(count, temperature), [], seed, 60.0)


def forward(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """f32[T]: of every token given those before it; the first is 0."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("check", contract.CLIENT_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[EngineClient], Awaitable[None]], server: VllmServer) -> None:
    async def body(client: WireEngineClient) -> None:
        await check(client)

    server.use(body)


def test_logprobs_are_those_of_the_distribution_that_was_sampled(server: VllmServer) -> None:
    model = loaded(server.model)

    async def body(client: WireEngineClient) -> None:
        for temperature in (1.0, 0.6):
            prompts = [[1, 2, 3, index] for index in range(8)]
            found = await asyncio.gather(
                *(client.generate(request(f"t{p}", p, 40, temperature=temperature, seed=p[3])) for p in prompts)
            )
            for prompt, made in zip(prompts, found):
                expected = forward(model, prompt + made.token_ids, temperature)[len(prompt) :]
                torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=EXACT / temperature, rtol=0)

    server.use(body)


def test_a_request_has_its_own_random_stream(server: VllmServer) -> None:
    """The same seed gives the same tokens, in other company too; another one gives others."""

    async def body(client: WireEngineClient) -> None:
        alone = await client.generate(request("a", [1, 2], 30, seed=7))
        others = await asyncio.gather(
            *(client.generate(request(f"b{seed}", [1, 2], 30, seed=seed)) for seed in (6, 7, 8, 2**64 - 1))
        )
        assert others[1].token_ids == alone.token_ids
        assert len({tuple(made.token_ids) for made in others}) == 4

    server.use(body)


def test_what_cannot_be_answered_says_why(server: VllmServer) -> None:
    async def body(client: WireEngineClient) -> None:
        for name, prompt, count, reason in (("long", [1] * 512, 4, "context_full"), ("none", [], 4, "bad_request")):
            with pytest.raises(EpisodeFailed) as caught:
                await client.generate(request(name, prompt, count))
            assert caught.value.reason == reason
        with pytest.raises(EpisodeFailed, match="vLLM refuses"):
            await client.generate(request("unknown", [100_000], 4))
        made = await client.generate(request("full", [1] * 500, 100))
        assert (len(made.token_ids), made.stop_reason) == (12, "length")

    server.use(body)


def test_sequences_cross_a_swap_and_every_token_is_of_its_version(server: VllmServer, tmp_path: Path) -> None:
    """With `swap_kv = "recompute"`, the default: later tokens are exact samples of the new weights. A version that the
    probes refuse fails what is in flight and leaves the former one."""
    models = [loaded(server.model), loaded(make_model(tmp_path / "other", seed=1))]
    sender = registry.build("channels", "filesystem", {}).sender(tmp_path / "channel")

    def publish(version: int, weights: int, probed: int) -> WeightsRef:
        tensors = {name: value for name, value in models[weights].state_dict().items() if name != "lm_head.weight"}
        probe = Probe([5, 6, 7, 8, 9, 10], forward(models[probed], [5, 6, 7, 8, 9, 10]).tolist())
        return sender.send(version, 0, iter(tensors.items()), [probe], 1e-3)

    async def body(client: WireEngineClient) -> None:
        good, bad = publish(1, 1, 1), publish(2, 0, 1)  # now: writing files while the engine computes may take long
        async with Load(client, 60, 480) as load:
            await load.underway()
            await client.install(good)
        crossed = 0
        for prompt, made in load.answers:
            sequence = [*prompt, *made.token_ids]
            for version in (0, 1):
                expected = forward(models[version], sequence)[len(prompt) :]
                mine = torch.tensor([v == version for v in made.versions])
                torch.testing.assert_close(torch.tensor(made.logprobs)[mine], expected[mine], atol=EXACT, rtol=0)
            assert made.versions == sorted(made.versions)
            crossed += set(made.versions) == {0, 1}
        assert crossed and not load.failures
        assert (await client.health()).version == 1

        async with Load(client, 60, 480) as load:
            await load.underway()
            with pytest.raises(Exception, match="probes do not agree"):
                await client.install(bad)
        assert any("not verified" in str(one) for one in load.failures)
        assert all(set(made.versions) == {1} for _, made in load.answers)
        made = await client.generate(request("after", [1, 2], 30))
        expected = forward(models[1], [1, 2, *made.token_ids])[2:]
        torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=EXACT, rtol=0)
        await client.install(publish(3, 0, 0))  # as it was, for the other tests

    server.use(body, patience_s=180)
    assert "Failed to load weights" not in server.log.read_text(), "vLLM says so of layers that are due nothing"


def test_requests_outlast_a_sleep(server: VllmServer) -> None:
    """vLLM on a CPU frees nothing, but it stops, forgets keys and values, and goes on as on a GPU."""
    model = loaded(server.model)

    async def body(client: WireEngineClient) -> None:
        async with Load(client, 40, 400) as load:
            await load.underway()
            await client.sleep()
            try:
                late = asyncio.create_task(client.generate(request("late", [4, 4], 20)))
                asleep = await client.health()
                answered = len(load.answers)
                await asyncio.sleep(0.5)
                assert asleep.paused and (await client.health()).info["tokens"] == asleep.info["tokens"]
                assert len(load.answers) == answered and not late.done()
            finally:
                await client.wake()
        assert len(load.answers) >= answered + 40 and not load.failures
        for prompt, made in [*load.answers, ([4, 4], await late)]:
            expected = forward(model, [*prompt, *made.token_ids])[len(prompt) :]
            torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=EXACT, rtol=0)

    server.use(body)


def test_heartbeats_say_how_full_it_is(server: VllmServer) -> None:
    async def body(client: WireEngineClient) -> None:
        seen: list[dict[str, float]] = []
        async with Load(client, 60, 400):
            while not seen or not all(max(one[name] for one in seen) for name in ("running", "waiting", "kv_usage")):
                seen.append(server.gauges)
                await asyncio.sleep(0.1)
        most = {name: max(one[name] for one in seen) for name in seen[-1]}
        assert 0 < most["running"] <= 16 < most["load"] and most["waiting"] > 0
        assert most["capacity"] == 32 * 128 and 0 < most["kv_usage"] <= 1

    server.use(body)
    assert server.info["vllm"].count(".") >= 2 and server.info["max_model_len"] == 512


def http(url: str, key: str = "", body: Any = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, None


def test_openai_clients_are_answered_with_the_key_and_nobody_without(server: VllmServer) -> None:
    api = server.info["api"]
    question = {
        "model": server.info["model"], "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5,
        "temperature": 0, "logprobs": True,
    }  # fmt: skip
    status, answer = http(f"{api}/chat/completions", TOKEN, question)
    assert status == 200 and len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    root = api.removesuffix("/v1")
    paths = [*http(f"{root}/openapi.json", TOKEN)[1]["paths"], "/metrics", "/docs", "/no/such/route", "/"]
    for path in paths:
        for key in ("", "wrong"):
            assert http(root + path, key)[0] == 401, path
            assert http(root + path, key, {})[0] == 401, path


def test_seeds_over_http_outlast_preemptions(server: VllmServer) -> None:
    """Long prompts, and more of them than the cache holds: each is computed several times, and never in parts, after
    which a random stream of a CPU could not be set back."""
    api, model = server.info["api"], server.info["model"]

    def ask(seed: int) -> tuple[int, Any]:
        prompt = [(seed + place) % 250 + 1 for place in range(300)]
        question = {"model": model, "prompt": prompt, "max_tokens": 200, "seed": seed, "ignore_eos": True}
        return http(f"{api}/completions", TOKEN, question)

    before = counted(server)["vllm:num_preemptions_total"]
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(ask, range(20)))
    assert [status for status, _ in answers] == [200] * 20
    assert {answer["usage"]["completion_tokens"] for _, answer in answers} == {200}
    assert counted(server)["vllm:num_preemptions_total"] > before, "the cache holds 4,096 tokens"


def test_vllm_s_metrics_count_our_requests_too(server: VllmServer) -> None:
    async def body(client: WireEngineClient) -> None:
        await asyncio.gather(*(client.generate(request(f"m{n}", [1, 2, 3, n], 30, seed=n)) for n in range(5)))

    before = counted(server)
    server.use(body)
    after = counted(server)
    more = {name: after[name] - before.get(name, 0.0) for name in after}
    assert more["vllm:generation_tokens_total"] == 5 * 30
    assert more["vllm:prompt_tokens_total"] == 5 * 4
    assert more["vllm:request_success_total"] == 5
    assert more["vllm:time_to_first_token_seconds_count"] == more["vllm:e2e_request_latency_seconds_count"] == 5
    assert 0 < more["vllm:time_to_first_token_seconds_sum"] < more["vllm:e2e_request_latency_seconds_sum"] < 300


def counted(server: VllmServer) -> dict[str, float]:
    """vLLM's metrics, summed over their labels."""
    url = server.info["api"].removesuffix("/v1") + "/metrics"
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    found: dict[str, float] = {}
    for line in urllib.request.urlopen(asked, timeout=60).read().decode().splitlines():
        if line.startswith("vllm:"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0.0) + value
    return found


def test_nothing_listens_beyond_loopback(server: VllmServer) -> None:
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    heard = [pair for process in processes for pair in listening(process.pid)]
    assert heard and {host for host, _ in heard} <= {"127.0.0.1", "0" * 24 + "01000000"}, heard


def test_every_route_of_vllm_wants_the_key(server: VllmServer, tmp_path: Path) -> None:
    """Also those of its development mode, which administrate."""
    assert PYTHON is not None
    foreign.link(tmp_path / "packages", ["prl-core", "prl-engine-vllm"])
    script = Path(__file__).with_name("vllm_routes.py")
    done = subprocess.run(
        [PYTHON, str(script), str(server.model)],
        env=foreign.variables(tmp_path / "packages"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["routes"] > 30 and found["answered"] == [] and found["with_key"] == 200


@pytest.mark.slow
def test_a_model_that_vllm_cannot_run_is_reported_in_vllm_s_words(tmp_path: Path) -> None:
    """Its kernels refuse the size of these heads when the first request comes, in a process of vLLM's."""
    server = VllmServer(tmp_path, make_model(tmp_path / "model", hidden_size=32))
    try:
        assert server.process.wait(200) == 3
        (said,) = [line for line in server.log.read_text().splitlines() if "vLLM cannot start" in line]
        assert "head_dim=16" in said
    finally:
        server.stop()


@pytest.mark.slow
def test_an_engine_whose_core_dies_ends(tmp_path: Path) -> None:
    server = VllmServer(tmp_path, make_model(tmp_path / "model")).wait()
    try:
        core = next(p for p in psutil.Process(server.process.pid).children() if "EngineCore" in " ".join(p.cmdline()))

        async def body(client: WireEngineClient) -> None:
            turn = asyncio.create_task(client.generate(request("r", [1, 2], 500)))
            await asyncio.sleep(0.2)
            core.send_signal(signal.SIGKILL)
            with pytest.raises(WireError):
                await turn

        server.use(body)
        assert server.process.wait(20) == 1
        assert "engine core has died" in server.log.read_text()
    finally:
        server.stop()
