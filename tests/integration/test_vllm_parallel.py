"""vLLM in several processes: data-parallel ranks, each with the whole model, and shards of it on two workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from prl import registry
from prl.engine.client import WireEngineClient
from prl.messages import WeightsRef
from prl.protocols import Probe

from .test_vllm_engine import EXACT, forward, loaded
from .vllm_runs import EDGE, VLLM, Ran
from .vllm_server import Load, VllmServer, make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VLLM != "cpu", reason="no vLLM for CPUs here: `make vllm`"),
]
UNBOUND = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two workers need no two NUMA nodes then."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two data-parallel ranks and every step of theirs."""
    ran = Ran(
        "tied", tmp_path_factory.mktemp("ranks"), data_parallel_size=2, disable_log_stats=False, max_num_seqs=6
    )  # fmt: skip
    ran.prompts = [ran.prompts[index % 3] for index in range(8)]
    for version in (1, 2, 3):
        ran.add_model(version)
    refs = {version: ran.publish(version, version) for version in (1, 2, 3)}
    ran.step("first", "install", ref=refs[1])
    ran.step("start", "start", prompts=ran.prompts, max_tokens=380)
    ran.step("until", "until", tokens=20)
    ran.step("placed", "placed")
    ran.step("gauges", "gauges")
    ran.step("second", "install", ref=refs[2])
    ran.step("crossed", "finish")
    ran.step("spoil", "spoil", rank=1)
    ran.step("third", "install", ref=refs[3])
    for rank in (0, 1):
        ran.step(f"rank {rank}", "score", sequences=ran.prompts, rank=rank)
    ran.step("again", "install", ref=refs[3])
    for rank in (0, 1):
        ran.step(f"rank {rank} again", "score", sequences=ran.prompts, rank=rank)
    ran.run(env=UNBOUND)
    return ran


def test_tokens_of_every_rank_are_of_the_version_that_they_say(ranks: Ran) -> None:
    assert [ranks.answers[label]["error"] for label in ("first", "second")] == ["", ""]
    assert ranks.answers["placed"] == [4, 4], "requests of ours at each of the two"
    versions = [made["versions"] for made in ranks.answers["crossed"]]
    assert any(set(each) == {1, 2} for each in versions), "sequences cross the swap"
    assert all(each == sorted(each) for each in versions)
    assert ranks.differences("crossed").abs().max() < EDGE


def test_gauges_are_sums_over_the_ranks(ranks: Ran) -> None:
    found = ranks.answers["gauges"]
    assert found["running"] == 8, "each computes six at most"
    assert found["capacity"] == 2 * 256 * 32
    assert found["waiting"] == 0 and 0 < found["kv_usage"] <= 1


def test_probes_are_scored_on_every_rank(ranks: Ran) -> None:
    """Weights that one rank alone has wrong are refused, and both hold the former version."""
    answer = ranks.answers["third"]
    assert "the probes do not agree after installing on data-parallel rank 1" in answer["error"]
    assert answer["version"] == 2 and not answer["ended"]
    for rank in (0, 1):
        assert ranks.score_differences(f"rank {rank}", 2).max() < EDGE
    assert ranks.answers["again"]["error"] == "" and ranks.answers["again"]["version"] == 3
    for rank in (0, 1):
        assert ranks.score_differences(f"rank {rank} again", 3).max() < EDGE


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("shards")
    server = VllmServer(folder, make_model(folder / "model"), tensor_parallel_size=2, env=UNBOUND)
    try:
        yield server.wait()
    finally:
        server.stop()


def test_shards_take_their_share_of_every_version(shards: VllmServer, tmp_path: Path) -> None:
    models = [loaded(shards.model), loaded(make_model(tmp_path / "other", seed=1))]
    sender = registry.build("channels", "filesystem", {}).sender(tmp_path / "channel")
    tensors = {name: value for name, value in models[1].state_dict().items() if name != "lm_head.weight"}
    probe = Probe([5, 6, 7, 8, 9, 10], forward(models[1], [5, 6, 7, 8, 9, 10]).tolist())
    published: WeightsRef = sender.send(1, 0, iter(tensors.items()), [probe], 1e-3)

    async def body(client: WireEngineClient) -> None:
        async with Load(client, 30, 400) as load:
            await load.underway()
            await client.install(published)
        crossed = 0
        for prompt, made in load.answers:
            sequence = [*prompt, *made.token_ids]
            for version in (0, 1):
                expected = forward(models[version], sequence)[len(prompt) :]
                mine = torch.tensor([v == version for v in made.versions])
                torch.testing.assert_close(torch.tensor(made.logprobs)[mine], expected[mine], atol=EXACT, rtol=0)
            crossed += set(made.versions) == {0, 1}
        assert crossed and not load.failures

    shards.use(body)
    assert "Failed to load weights" not in shards.log.read_text()


def test_nothing_is_left_in_shared_memory_after_a_kill(shards: VllmServer) -> None:
    """The last one here: the process, then its group, as a launcher does it."""
    processes = [shards.process.pid, *(p.pid for p in psutil.Process(shards.process.pid).children(recursive=True))]
    mapped = {name for pid in processes for name in in_shared_memory(pid)}
    for kind in ("psm_", "vllm_dist_"):
        assert any(name.startswith(kind) for name in mapped), (kind, mapped)
    os.kill(shards.process.pid, signal.SIGKILL)
    os.killpg(shards.process.pid, signal.SIGKILL)
    shards.process.wait()
    deadline = time.monotonic() + 30
    while left := [name for name in mapped if (Path("/dev/shm") / name).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert "resource_tracker" not in shards.log.read_text()


def in_shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm of what a process has mapped and what is not removed yet."""
    paths = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {path.removeprefix("/dev/shm/") for path in paths if path.startswith("/dev/shm/") and "deleted" not in path}
