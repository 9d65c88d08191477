"""vLLM on an NVIDIA GPU behind its real client: the contract, weights through the GPU's memory, adapters.

Every class has one engine, started as a run starts it. `pytest -n 4 --dist loadscope` runs them side by side.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from prl.adapters import Adapter
from prl.errors import WeightsError
from prl.protocols import Probe
from prl.testing.contracts import engine as contract
from prl_engine_vllm import interpreter
from prl_engine_vllm.config import VllmConfig

from .vllm_rig import Rig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(interpreter.choose(VllmConfig()) is None, reason="no Python with vLLM here"),
]

Keywords = dict[str, Any]

ROOM = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
"""Of each engine: several start beside one another, so none may measure what is free."""
NOISE = 5e-3
"""Mean KL of two implementations in bfloat16 on these peaked distributions; measured is about 2e-3 on a real model."""
OF_FLOAT32 = (contract.logprobs_are_those_of_the_model, contract.companions_do_not_change_a_greedy_answer)
"""What bfloat16 cannot promise."""


@pytest.fixture(scope="class")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """The engine of a class, by its `ENGINE`: keywords of `Rig`."""
    rig = Rig(tmp_path_factory.mktemp("engine"), **{"channel": "cuda_ipc", "engine": ROOM, **request.cls.ENGINE})
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


class TestFloat32:
    ENGINE: ClassVar[Keywords] = {"dtype": "float32"}

    @pytest.mark.parametrize("check", contract.CLIENT_CHECKS, ids=lambda check: check.__name__)
    def test_the_contract(self, rig: Rig, check: object) -> None:
        rig.run(check(rig.client))  # type: ignore[operator]


class TestBfloat16:
    ENGINE: ClassVar[Keywords] = {"dtype": "bfloat16"}

    @pytest.mark.parametrize(
        "check", [c for c in contract.CLIENT_CHECKS if c not in OF_FLOAT32], ids=lambda check: check.__name__
    )
    def test_the_contract(self, rig: Rig, check: object) -> None:
        rig.run(check(rig.client))  # type: ignore[operator]

    def test_three_publishes_stay_within_noise(self, rig: Rig) -> None:
        for version in (1, 2, 3):
            former = copy.deepcopy(rig.model)
            rig.change(version)
            rig.run(rig.client.install(rig.publish(version)))
            answers = rig.run(rig.answers(32, 48))
            assert {v for _, made in answers for v in made.versions} == {version}
            own, others = rig.kl(answers), rig.kl(answers, former)
            health = rig.run(rig.client.health())
            print(f"version {version}: KL {own:.1e}, to the version before {others:.1e}, {health.info}")
            assert own < NOISE < others
            rig.sender.release([version - 1])

    def test_tokens_after_a_swap_in_flight_are_the_new_version_s(self, rig: Rig) -> None:
        before = rig.run(rig.client.health()).version

        async def during() -> list[object]:
            running = asyncio.ensure_future(rig.answers(32, 480))
            await asyncio.sleep(0.5)
            rig.change(100)
            await rig.client.install(rig.publish(before + 1))
            return list(await running)

        former = copy.deepcopy(rig.model)
        found = {before: 0.0, before + 1: 0.0}
        count = dict.fromkeys(found, 0)
        for prompt, made in rig.run(during()):  # type: ignore[misc]
            whole = [*prompt, *made.token_ids]
            for version, model in ((before, former), (before + 1, rig.model)):
                expected = rig.forward(whole, model)[len(prompt) - 1 :]
                for theirs, ours, carried in zip(expected, made.logprobs, made.versions, strict=True):
                    if carried == version:
                        found[version] += abs(theirs - ours)
                        count[version] += 1
        assert all(count.values()), f"no sequence crossed the swap: {count}"
        means = {version: found[version] / count[version] for version in found}
        print(f"mean |difference| by version {means}, tokens {count}")
        assert max(means.values()) < 0.1

    def test_probes_that_do_not_agree_leave_the_former_version(self, rig: Rig) -> None:
        before = rig.run(rig.client.health())
        (scores,) = rig.run(rig.client.score([list(range(1, 20))]))
        other = copy.deepcopy(rig.model)
        true = rig.probes()
        rig.change(7, 0.5)
        wrong = [Probe(probe.token_ids, [value - 1.0 for value in probe.logprobs]) for probe in true]
        with pytest.raises(WeightsError, match="probes do not agree"):
            rig.run(rig.client.install(rig.publish(before.version + 1, wrong)))
        rig.model = other
        (again,) = rig.run(rig.client.score([list(range(1, 20))]))
        assert rig.run(rig.client.health()).version == before.version
        assert max(abs(a - b) for a, b in zip(scores, again, strict=True)) < 0.05


class TestAdapters:
    ENGINE: ClassVar[Keywords] = {
        "dtype": "bfloat16",
        "trainer": 'lora = {rank = 8, alpha = 16.0, targets = ["q_proj", "v_proj", "down_proj"]}',
    }
    RANK, TARGETS = 8, ("q_proj", "v_proj", "down_proj")

    def test_each_version_is_an_adapter_of_its_own(self, rig: Rig) -> None:
        adapter = Adapter(self.RANK, 16.0, self.TARGETS)
        answers = rig.run(rig.answers(16, 32))
        assert rig.kl(answers) < NOISE, "the model it started with"
        for version in (1, 2):
            former = rig.model
            rig.model = rig.load()
            rig.run(rig.client.install(rig.publish_adapter(version, adapter, self.adapters(rig, version))))
            answers = rig.run(rig.answers(32, 48))
            assert {v for _, made in answers for v in made.versions} == {version}
            own, others = rig.kl(answers), rig.kl(answers, former)
            print(f"adapter {version}: KL {own:.1e}, to the version before {others:.1e}")
            assert own < 2 * NOISE < others

    def adapters(self, rig: Rig, seed: int) -> dict[str, torch.Tensor]:
        """Tensors under PEFT's names; the rig's model gets them merged."""
        generator = torch.Generator(rig.device).manual_seed(seed)
        found = {}
        for name, module in rig.model.named_modules():
            if name.rpartition(".")[2] in self.TARGETS:
                out, width = module.weight.shape
                a, b = (
                    torch.randn(shape, generator=generator, device=rig.device).mul_(size).bfloat16()
                    for shape, size in (((self.RANK, width), 0.1), ((out, self.RANK), 0.05))
                )
                module.weight.data.add_(16.0 / self.RANK * (b.float() @ a.float()).to(module.weight.dtype))
                found[f"base_model.model.{name}.lora_A.weight"] = a
                found[f"base_model.model.{name}.lora_B.weight"] = b
        return found
