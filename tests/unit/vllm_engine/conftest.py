"""The installer over real worker extensions and a model that is a dictionary: everything of vLLM's is fake."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prl import faults
from prl.errors import WeightsError
from prl.messages import Installed, WeightsRef
from prl.protocols import Adapter, Probe, ReceivedWeights
from prl_engine_vllm import reload as reloads
from prl_engine_vllm import worker as workers
from prl_engine_vllm.adapters import Adapters
from prl_engine_vllm.install import Installer
from prl_engine_vllm.worker import Setup, WorkerExtension

SEQUENCE = [1, 2, 3, 4]


class Shelf:
    """What a test put into `versions`; a reading of one in `blocked` waits for its event."""

    def __init__(self) -> None:
        self.versions: dict[int, ReceivedWeights] = {}
        self.blocked: dict[int, threading.Event] = {}
        self.read: list[int] = []

    def receiver(self) -> Receiver:
        return Receiver(self)

    def receive(self, weights: WeightsRef) -> ReceivedWeights:
        faults.point("channel.receive")
        self.read.append(weights.version)
        if weights.version in self.blocked:
            self.blocked[weights.version].wait(20)
        if weights.version not in self.versions:
            raise WeightsError(f"no manifest of version {weights.version}")
        return self.versions[weights.version]


class Receiver:
    """Reads one version at a time, as those of the channels do."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = threading.Lock()

    def receive(self, weights: WeightsRef) -> ReceivedWeights:
        with self._lock:
            return self._shelf.receive(weights)


class OnGpu:
    """A tensor that says it lies on a GPU."""

    is_cuda = True

    def __init__(self, value: float) -> None:
        self.shape = (2,)
        self._value = value

    def __getitem__(self, index: int) -> float:
        return self._value


class Worker(WorkerExtension):
    def __init__(self, rank: int, index: int) -> None:
        self.rank = rank
        self.device = SimpleNamespace(type="cpu")
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=index))
        self.model = 0.0
        """The one number that its weights come to."""
        self.refuses: list[float] = []


class Gate:
    """Scores with what the workers of a rank hold, and writes down what it is told."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[Any] = []

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self, version: int, incarnation: int) -> None:
        self.calls.append(("resume", version, incarnation))

    def hold(self) -> None:
        self.calls.append("hold")

    def release(self) -> None:
        self.calls.append("release")

    async def fail_in_flight(self, reason: str) -> None:
        self.calls.append("fail")

    async def score(self, sequences: Sequence[Sequence[int]], *, rank: int | None = None, lora: Any = None) -> Any:
        self.calls.append(("score", rank or 0, lora.lora_int_id if lora else None))
        models = {worker.model for worker in self.world.engines[rank or 0]}
        assert len(models) == 1, f"the workers of an engine hold different weights: {models}"
        return [[0.0, *[-models.pop()] * (len(sequences[0]) - 1)] for _ in sequences]

    def serve_adapter(self, version: int, incarnation: int, lora: Any) -> None:
        self.calls.append(("adapter", version, lora.lora_int_id))
        self.world.adapters_in_use.add(lora.lora_int_id)

    def adapters_in_use(self) -> set[int]:
        return self.world.adapters_in_use


class Core:
    """vLLM's client of its engine cores, and the front of it, as far as they are used."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core_engines = [bytes([index]) for index in range(len(world.engines))]
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=world.quantization))
        self.engine_core = self
        self.resets = 0
        self.loras: set[int] = set()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.world.engines[0]]

    async def _call_utility_async(
        self, name: str, method: str, timeout: Any, args: Any, kwargs: Any, engine: bytes
    ) -> Any:
        return [getattr(worker, method)(*args) for worker in self.world.engines[engine[0]]]

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.resets += 1
        return True

    async def add_lora(self, lora: Any) -> bool:
        assert (Path(lora.lora_path) / "adapter_config.json").is_file()
        self.loras.add(lora.lora_int_id)
        return True

    async def remove_lora(self, number: int) -> bool:
        self.loras.remove(number)
        return True


class World:
    """`engines` data-parallel engines of `workers` workers each."""

    def __init__(self, folder: Path, engines: int, workers: int, timeout_s: float, quantization: str | None) -> None:
        self.shelf = Shelf()
        self.quantization = quantization
        self.engines = [[Worker(rank, index) for rank in range(workers)] for index in range(engines)]
        self.adapters_in_use: set[int] = set()
        self.gate = Gate(self)
        self.core = Core(self)
        self.ended: list[str] = []
        self.installer = Installer(
            self.core,
            self.gate,
            Setup("shelf", {}),
            timeout_s=timeout_s,
            adapters=Adapters(self.core, folder / "adapters"),
            end=self.ended.append,
        )

    def put(self, version: int, *, probes: float | None = None, tolerance: float = 0.01, **changes: Any) -> WeightsRef:
        """Version `version` is the weights whose model scores -version; its probes say so, or `probes`."""
        tensors: dict[str, Any] = {"scale": torch.full((2,), float(version)), "bias": torch.zeros(3), **changes}
        said = [0.0, *[-(float(version) if probes is None else probes)] * (len(SEQUENCE) - 1)]
        self.shelf.versions[version] = ReceivedWeights(tensors, [Probe(SEQUENCE, said)], tolerance)
        return WeightsRef(version, 0, "shelf")

    def put_adapter(self, version: int) -> WeightsRef:
        self.put(version, probes=0.0)
        received = self.shelf.versions[version]
        received.adapter = Adapter(8, 16.0, ("q_proj",))
        return WeightsRef(version, 0, "shelf", adapter=True)

    @property
    def models(self) -> set[float]:
        return {worker.model for workers in self.engines for worker in workers}

    async def install(self, weights: WeightsRef) -> Installed:
        return await self.installer.install(weights)


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[World] = []

    def reload(worker: Worker, tensors: Any) -> None:
        value = 0.0 if tensors is None else float(tensors["scale"][0])
        worker.model = -1.0  # in pieces
        faults.point("engine.apply")
        if value in worker.refuses:
            raise WeightsError(f"vLLM could not load scale: {value}")
        worker.model = value

    def make(*, engines: int = 1, workers: int = 1, timeout_s: float = 5.0, quantization: str | None = None) -> World:
        made.append(World(tmp_path, engines, workers, timeout_s, quantization))
        return made[-1]

    def build(kind: str, name: str, table: Any) -> Any:
        assert (kind, name) == ("channels", "shelf")
        return made[-1].shelf

    monkeypatch.setattr(reloads, "reload", reload)
    monkeypatch.setattr(workers.registry, "build", build)
    yield make
    for world in made:
        for event in world.shelf.blocked.values():
            event.set()
    faults.install("engine", plan=[])
