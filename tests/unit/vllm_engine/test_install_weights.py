"""Installing weights in the vLLM engine: every way it can go wrong leaves exactly one whole, verified version."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from prl import faults
from prl.errors import WeightsError
from prl.faults import Fault
from prl.messages import Installed
from prl_engine_vllm import probes
from prl_engine_vllm.adapters import arguments
from prl_engine_vllm.worker import Setup

from .conftest import OnGpu

STATES = ("announced", "transferring", "installed", "verified", "acknowledged")


def armed(*plan: Fault) -> None:
    faults.install("engine", plan=list(plan))


def test_a_version_is_read_then_exchanged_then_verified_then_served(make_world: Any) -> None:
    async def main() -> None:
        world = make_world(engines=2, workers=2)
        await world.install(world.put(1))
        assert world.models == {1.0}
        assert world.gate.calls == [
            "pause",
            "hold",
            ("resume", 1, 0),
            ("score", 0, None),
            ("score", 1, None),
            "release",
        ]
        info = world.installer.info()
        assert info["installs"] == 1 and 0 < info["swap_stall_s"] <= info["install_held_s"]
        assert world.installer.gauges()["swap_stall_s"] > 0 and world.installer.doing == ""
        assert info["probes_differ"] == 0.0 and info["probe_kl"] == 0.0

    asyncio.run(main())


def test_the_version_held_is_not_installed_again_but_a_newer_incarnation_of_it_is(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        ref = world.put(1)
        found = await world.install(ref)
        del world.gate.calls[:]
        assert await world.install(ref) == found
        assert world.gate.calls == []
        await world.install(msgspec.structs.replace(ref, incarnation=1))
        assert (world.installer.version, world.installer.incarnation) == (1, 1) and ("resume", 1, 1) in world.gate.calls

    asyncio.run(main())


def test_version_0_is_installed_though_an_engine_starts_with_that_number(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        await world.install(world.put(0))
        assert ("resume", 0, 0) in world.gate.calls

    asyncio.run(main())


BROKEN = {
    "no manifest of version 2": lambda world: world.shelf.versions.pop(2),
    "bias is missing": lambda world: world.shelf.versions[2].tensors.pop("bias"),
    "extra is new": lambda world: world.shelf.versions[2].tensors.update(extra=torch.zeros(1)),
    r"bias has shape \(4,\), the version before it has \(3,\)": lambda world: world.put(2, bias=torch.zeros(4)),
}


@pytest.mark.parametrize("match", sorted(BROKEN))
def test_weights_that_are_not_whole_touch_nothing(make_world: Any, match: str) -> None:
    async def main() -> None:
        world = make_world(workers=2)
        await world.install(world.put(1))
        del world.gate.calls[:]
        ref = world.put(2)
        BROKEN[match](world)
        with pytest.raises(WeightsError, match=match):
            await world.install(ref)
        assert world.gate.calls == [] and world.models == {1.0} and world.installer.version == 1
        assert world.installer.info()["install_error"]
        await world.install(world.put(3))
        assert world.models == {3.0} and "install_error" not in world.installer.info()

    asyncio.run(main())


def test_a_worker_that_cannot_apply_a_version_brings_the_former_one_back_everywhere(make_world: Any) -> None:
    """Not a token was made of it, so requests in flight go on."""

    async def main() -> None:
        world = make_world(engines=2, workers=2)
        await world.install(world.put(1))
        del world.gate.calls[:]
        world.engines[1][0].refuses = [2.0]
        with pytest.raises(WeightsError, match="worker 2: vLLM could not load scale"):
            await world.install(world.put(2))
        assert world.models == {1.0} and "fail" not in world.gate.calls
        scores = [("score", 0, None), ("score", 1, None)]
        assert world.gate.calls == ["pause", "hold", ("resume", 1, 0), *scores, "release"]
        assert not world.ended

    asyncio.run(main())


def test_probes_that_disagree_fail_what_is_in_flight_and_bring_the_former_version_back(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        await world.install(world.put(1))
        del world.gate.calls[:]
        with pytest.raises(WeightsError, match=r"probes do not agree .* 0\.5 over 3 tokens, allowed is 0\.01"):
            await world.install(world.put(2, probes=2.5))
        assert world.models == {1.0} and world.installer.version == 1 and world.core.resets == 1
        score = ("score", 0, None)
        assert world.gate.calls == [
            "pause", "hold", ("resume", 2, 0), score, "pause", "fail", ("resume", 1, 0), score, "release",
        ]  # fmt: skip

    asyncio.run(main())


def test_every_data_parallel_rank_must_agree(make_world: Any) -> None:
    async def main() -> None:
        world = make_world(engines=2)
        await world.install(world.put(1))
        score = world.gate.score

        async def second_rank_is_off(sequences: Any, *, rank: Any = None, lora: Any = None) -> Any:
            found = await score(sequences, rank=rank, lora=lora)
            off = rank == 1 and world.models == {2.0}
            return [[value - 0.1 * off for value in values] for values in found]

        world.gate.score = second_rank_is_off
        with pytest.raises(WeightsError, match="data-parallel rank 1"):
            await world.install(world.put(2))
        assert world.models == {1.0}

    asyncio.run(main())


def test_not_a_number_is_no_agreement(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        with pytest.raises(WeightsError, match="do not agree"):
            await world.install(world.put(1, probes=float("nan")))
        assert world.models == {0.0}, "the folder it was started with"

    asyncio.run(main())


def test_an_engine_that_can_put_nothing_whole_back_ends_itself_and_answers_nobody(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        await world.install(world.put(1))
        del world.gate.calls[:]
        world.engines[0][0].refuses = [1.0, 2.0]
        with pytest.raises(WeightsError):
            await world.install(world.put(2))
        assert len(world.ended) == 1 and "version 1 cannot be put back" in world.ended[0]
        assert "release" not in world.gate.calls

    asyncio.run(main())


def test_a_former_version_that_no_longer_scores_as_it_did_ends_the_engine(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        await world.install(world.put(1))
        world.shelf.versions[1].tensors["scale"].fill_(1.5)  # type: ignore[index]
        with pytest.raises(WeightsError):
            await world.install(world.put(2, probes=9.0))
        assert world.ended

    asyncio.run(main())


@pytest.mark.parametrize("state", STATES)
def test_a_failure_in_any_state_leaves_one_whole_version(make_world: Any, state: str) -> None:
    _fails_and_recovers(make_world, state, "error", "fault injection")


@pytest.mark.parametrize("state", ["announced", "installed", "verified"])
def test_a_hang_in_any_state_ends_in_time_with_one_whole_version(make_world: Any, state: str) -> None:
    _fails_and_recovers(make_world, state, "delay", rf"{state} took longer than 1 s, half of engine.install_timeout_s")


def _fails_and_recovers(make_world: Any, state: str, action: Any, match: str) -> None:
    async def main() -> None:
        world = make_world(workers=2)
        await world.install(world.put(1))
        world.installer._limit_s = 1.0
        armed(Fault("engine", f"engine.{state}", action, at=1, seconds=1.2))
        with pytest.raises(WeightsError, match=match):
            await asyncio.wait_for(world.install(world.put(2)), 3)
        held = 2 if state == "acknowledged" else 1
        assert world.installer.version == held and world.models == {float(held)} and not world.ended
        assert world.gate.calls[-1] == "release", "nothing stays held back"
        world.installer._limit_s = 5.0
        await world.install(world.put(2))
        assert world.installer.version == 2 and world.models == {2.0}

    asyncio.run(main())


def test_a_reading_that_hangs_is_given_up_and_the_next_version_installs(make_world: Any) -> None:
    async def main() -> None:
        world = make_world(timeout_s=0.4)
        world.shelf.blocked[1] = threading.Event()
        with pytest.raises(WeightsError, match="took longer"):
            await world.install(world.put(1))
        world.installer._limit_s = 5.0
        await world.install(world.put(2))
        world.shelf.blocked[1].set()
        await asyncio.sleep(0.1)
        assert world.models == {2.0} and world.installer.version == 2

    asyncio.run(main())


def test_what_lies_on_a_gpu_is_not_kept_but_read_again_to_be_put_back(make_world: Any) -> None:
    """Else an engine would hold its model twice; its channel has the version until a newer one is acknowledged."""

    async def main() -> None:
        world = make_world()
        await world.install(world.put(1, scale=OnGpu(1.0)))
        assert world.engines[0][0]._prl_versions()._current.tensors is None
        with pytest.raises(WeightsError, match="do not agree"):
            await world.install(world.put(2, scale=OnGpu(2.0), probes=3.0))
        assert world.shelf.read == [1, 2, 1] and world.models == {1.0} and not world.ended
        await world.install(world.put(3))  # on the CPU: kept, so never read again
        with pytest.raises(WeightsError, match="do not agree"):
            await world.install(world.put(4, probes=3.0))
        assert world.shelf.read == [1, 2, 1, 3, 4] and world.models == {3.0}

    asyncio.run(main())


def test_installs_that_overlap_happen_one_after_another(make_world: Any) -> None:
    """T13: the engine ends with the later version, whole."""

    async def main() -> None:
        world = make_world()
        world.shelf.blocked[1] = threading.Event()
        first = asyncio.create_task(world.install(world.put(1)))
        await asyncio.sleep(0.05)
        assert "transferring" in world.installer.info()["installing"]
        second = asyncio.create_task(world.install(world.put(2)))
        await asyncio.sleep(0.05)
        world.shelf.blocked[1].set()
        await asyncio.gather(first, second)
        assert world.models == {2.0} and world.installer.version == 2
        assert [call[1] for call in world.gate.calls if call[0] == "resume"] == [1, 2]

    asyncio.run(main())


def test_an_install_ends_though_its_caller_went_away(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        world.shelf.blocked[1] = threading.Event()
        caller = asyncio.create_task(world.install(world.put(1)))
        await asyncio.sleep(0.05)
        caller.cancel()
        world.shelf.blocked[1].set()
        while "release" not in world.gate.calls:
            await asyncio.sleep(0.01)
        assert world.models == {1.0} and world.installer.version == 1

    asyncio.run(main())


def test_an_engine_that_quantises_may_differ_more() -> None:
    assert probes.allowed(1e-3, quantised=False) == 1e-3
    assert probes.allowed(1e-3, quantised=True) == 0.3
    assert probes.allowed(0.25, quantised=True) == 0.5


def test_probes_of_a_quantised_engine_are_checked_with_that(make_world: Any) -> None:
    async def main() -> None:
        world = make_world(quantization="fp8")
        found = await world.install(world.put(1, probes=1.2))
        assert (found.probe_tokens, found.probe_difference) == (3, pytest.approx(0.2))
        assert found.probe_kl == pytest.approx(math.exp(-0.2) - 0.8), "the engine finds every token more probable"
        with pytest.raises(WeightsError, match=r"allowed is 0\.3"):
            await world.install(world.put(2, probes=2.4))

    asyncio.run(main())


def test_what_a_worker_is_told_survives_plain_values() -> None:
    """`collective_rpc` carries plain values alone, unless vLLM's insecure serialization is on."""
    setup = Setup("filesystem", {"fsync": True}, [Fault("engine", "channel.receive", "kill", at=2)], 1, 7)
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(setup))), Setup) == setup


# --- adapters ---------------------------------------------------------------------------------------------


class LoRARequest(msgspec.Struct):
    lora_name: str
    lora_int_id: int
    lora_path: str


@pytest.fixture
def vllm_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.lora.request"], "LoRARequest", LoRARequest, raising=False)


@pytest.mark.usefixtures("vllm_lora")
def test_adapters_serve_without_a_pause_and_unused_ones_go(make_world: Any, tmp_path: Path) -> None:
    async def main() -> None:
        world = make_world(engines=2, workers=2)
        found = await world.install(world.put_adapter(1))
        assert world.gate.calls == [("score", 0, 1), ("score", 1, 1), ("adapter", 1, 1)]
        assert found == Installed(2 * 3, 0.0, 0.0), "three tokens on each of two ranks"
        folder = tmp_path / "adapters" / "1"
        described = json.loads((folder / "adapter_config.json").read_text())
        assert (described["r"], described["lora_alpha"], described["target_modules"]) == (8, 16.0, ["q_proj"])
        await world.install(world.put_adapter(2))
        assert world.core.loras == {1, 2}, "a request in flight has the first"
        world.adapters_in_use.discard(1)
        await world.install(world.put_adapter(3))
        assert world.core.loras == {2, 3} and not folder.exists()
        world.installer.close()
        assert not (tmp_path / "adapters").exists()

    asyncio.run(main())


@pytest.mark.usefixtures("vllm_lora")
def test_adapters_whose_probes_disagree_are_never_served(make_world: Any) -> None:
    async def main() -> None:
        world = make_world()
        await world.install(world.put_adapter(1))
        ref = world.put_adapter(2)
        world.shelf.versions[2].probes[0].logprobs[1] = -3.0
        with pytest.raises(WeightsError, match="do not agree"):
            await world.install(ref)
        assert world.core.loras == {1} and world.installer.version == 1
        assert ("adapter", 2, 2) not in world.gate.calls

    asyncio.run(main())


def test_room_for_adapters_covers_every_version_that_may_be_in_flight() -> None:
    from prl.protocols import Adapter

    assert arguments(Adapter(12, 1.0, ("q_proj",)), 4) == {
        "enable_lora": True, "max_lora_rank": 16, "max_loras": 6, "max_cpu_loras": 6, "lora_target_modules": ["q_proj"],
    }  # fmt: skip
    assert arguments(Adapter(8, 1.0, ()), 0)["max_loras"] == 2
    assert arguments(Adapter(8, 1.0, ()), 100)["max_loras"] == 8
    with pytest.raises(Exception, match="rank 1000: vLLM takes 512 at most"):
        arguments(Adapter(1000, 1.0, ()), 0)
