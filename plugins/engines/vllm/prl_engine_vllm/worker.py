"""What is added to every worker of vLLM (`worker_extension_cls`): it reads versions of the weights and applies them.

The process that drives the engine (`install`) calls these methods with `collective_rpc`. Arguments and results are
plain values: nothing is pickled by us and vLLM's insecure serialization stays off. Every worker reads the full tensors
and vLLM takes its share of each.

    prl_begin    read a version in a thread, while generation goes on
    prl_poll     how far that is; when it is read, its probes
    prl_apply    put it into the model: called between two steps, while the engine is paused
    prl_restore  put the version before it, or the folder the engine was started with, into the model again
    prl_keep     it is verified: the one before it may go
    prl_adapter  write adapters that were read as a folder that vLLM can load

None of them raises for what may go wrong with weights, since vLLM would make another error of it: a result has
"error", which is empty where all is well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from prl import faults, registry
from prl.errors import PrlError, WeightsError
from prl.faults import Fault
from prl.messages import WeightsRef
from prl.protocols import ChannelReceiver, ReceivedWeights
from prl_engine_vllm.adapters import write_folder

Answer = dict[str, Any]


class Setup(msgspec.Struct):
    """What a worker is told once: the channel's table, and the failures that a test wants."""

    channel: str
    table: dict[str, Any]
    faults: list[Fault] = []
    replica: int = 0
    seed: int = 0


class WorkerExtension:
    """Mixed into vLLM's worker class. No name of it may be one of the worker's."""

    def prl_begin(self, token: str, ref: dict[str, Any], setup: dict[str, Any]) -> Answer:
        return self._prl_versions().begin(token, msgspec.convert(ref, WeightsRef), msgspec.convert(setup, Setup))

    def prl_poll(self, token: str) -> Answer:
        return self._prl_versions().poll(token)

    def prl_apply(self, token: str) -> Answer:
        return self._prl_versions().apply(token)

    def prl_restore(self) -> Answer:
        return self._prl_versions().restore()

    def prl_keep(self, token: str) -> Answer:
        return self._prl_versions().keep(token)

    def prl_adapter(self, token: str, folder: str) -> Answer:
        return self._prl_versions().write_adapter(token, Path(folder))

    def _prl_versions(self) -> Versions:
        versions: Versions | None = self.__dict__.get("_prl_held")
        if versions is None:
            versions = self.__dict__["_prl_held"] = Versions(self)
        return versions


class Versions:
    """The versions that one worker holds: the one in the model, and the one that is to follow it."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._receiver: ChannelReceiver | None = None
        self._reading: Reading | None = None
        self._current: Current | None = None
        self._no_part_in = ""
        self._armed = False

    def begin(self, token: str, ref: WeightsRef, setup: Setup) -> Answer:
        if ref.adapter and not self._is_first():
            self._no_part_in = token  # one worker writes the folder that all load
            return {"error": ""}
        if self._reading is not None and self._reading.hangs:
            # Left alone with its receiver, which may be locked: nobody asks for what it brings.
            self._receiver = None
        try:
            if self._receiver is None:
                if not self._armed:
                    faults.install("engine", setup.replica, seed=setup.seed, plan=setup.faults)
                    self._armed = True
                self._receiver = registry.build("channels", setup.channel, setup.table).receiver()
        except Exception as error:
            return {"error": said(error)}
        self._reading = Reading(token, ref, self._receiver, self._worker.device, self._current)
        return {"error": ""}

    def poll(self, token: str) -> Answer:
        """Whether it is read; then the first worker's answer has the probes."""
        if token == self._no_part_in:
            return {"error": "", "read": True, "probes": [], "tolerance": 0.0, "tensors": 0, "seconds": 0.0}
        reading = self._asked(token)
        if reading is None:
            return {"error": "this worker does not read this version"}
        if reading.error:
            self._reading = None
            return {"error": reading.error}
        received = reading.received
        if received is None:
            return {"error": "", "read": False}
        told = received.probes if self._is_first() else []
        return {
            "error": "",
            "read": True,
            "probes": [[probe.token_ids, probe.logprobs, probe.first] for probe in told],
            "tolerance": received.tolerance,
            "tensors": len(received.tensors),
            "seconds": reading.seconds,
        }

    def apply(self, token: str) -> Answer:
        reading = self._asked(token)
        if reading is None or reading.received is None:
            return {"error": "this worker has not read this version"}
        received = reading.received
        return self._reload(lambda: received.tensors)

    def restore(self) -> Answer:
        self._reading = None  # and with it what it holds on a GPU
        current, receiver = self._current, self._receiver
        return self._reload(lambda: None if current is None or receiver is None else current.again(receiver))

    def keep(self, token: str) -> Answer:
        reading = self._asked(token)
        if reading is not None and reading.received is not None:
            self._current, self._reading = Current(reading.ref, reading.received.tensors), None
        return {"error": ""}

    def write_adapter(self, token: str, folder: Path) -> Answer:
        reading = self._asked(token)
        if reading is None:
            return {"error": "" if token == self._no_part_in else "this worker does not read this version"}
        received, self._reading = reading.received, None
        try:
            if received is None or received.adapter is None:
                raise WeightsError("what was read is whole weights, announced were adapters")
            write_folder(folder, received.adapter, received.tensors)
        except Exception as error:
            return {"error": said(error)}
        return {"error": ""}

    def _reload(self, tensors: Callable[[], Mapping[str, Any] | None]) -> Answer:
        from prl_engine_vllm.reload import reload

        started = time.monotonic()
        try:
            reload(self._worker, tensors())
        except Exception as error:
            return {"error": said(error)}
        return {"error": "", "seconds": time.monotonic() - started}

    def _asked(self, token: str) -> Reading | None:
        return self._reading if self._reading is not None and self._reading.token == token else None

    def _is_first(self) -> bool:
        """Of all workers of this engine, those of other data-parallel ranks too."""
        first: bool = self._worker.rank == 0 and self._worker.vllm_config.parallel_config.data_parallel_index == 0
        return first


class Current:
    """The version in the model. Mapped files and shared memory are kept, for they cost nothing; what lies on a GPU is
    let go, and read once more should it be needed: its channel has it until a newer version is acknowledged."""

    def __init__(self, ref: WeightsRef, tensors: Mapping[str, Any]) -> None:
        self.ref = ref
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.tensors = None if any(tensor.is_cuda for tensor in tensors.values()) else tensors

    def again(self, receiver: ChannelReceiver) -> Mapping[str, Any]:
        return self.tensors if self.tensors is not None else receiver.receive(self.ref).tensors


class Reading:
    """One version on its way, in a thread of its own. `received` or `error` is set when it is over."""

    def __init__(
        self, token: str, ref: WeightsRef, receiver: ChannelReceiver, device: Any, former: Current | None
    ) -> None:
        self.token = token
        self.received: ReceivedWeights | None = None
        self.error = ""
        self.seconds = 0.0
        self.ref = ref
        self._receiver = receiver
        self._device = device
        self._shapes = None if former is None else former.shapes
        threading.Thread(target=self._read, name=f"weights {ref.version}", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Neither read nor failed so far."""
        return self.received is None and not self.error

    def _read(self) -> None:
        started = time.monotonic()
        try:
            on_gpu = self._device is not None and self._device.type == "cuda"
            if on_gpu:
                import torch

                torch.cuda.set_device(self._device)  # of this thread
            received = self._receiver.receive(self.ref)
            if on_gpu:
                torch.cuda.current_stream().synchronize()
            if self._shapes is not None and not self.ref.adapter:
                check_alike(self._shapes, received.tensors)
            self.seconds = time.monotonic() - started
            self.received = received
        except Exception as error:
            self.error = said(error)


def check_alike(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any]) -> None:
    """Raises:
    WeightsError: a version does not have exactly the tensors, by name and shape, that the one before it has.
    """
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        what = f"{missing[0]} is missing" if missing else f"{extra[0]} is new"
        raise WeightsError(
            f"these weights have {len(tensors)} tensors, the version before them has {len(shapes)}: {what}"
        )
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, the version before it has {shapes[name]}")


def said(error: Exception) -> str:
    """What an error says; our own need no name in front."""
    return str(error) if isinstance(error, PrlError) else f"{type(error).__name__}: {error}"
