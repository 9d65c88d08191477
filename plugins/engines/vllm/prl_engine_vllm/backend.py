"""The engine behind `prl.engine`: generation and installing weights, joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from prl.engine.backend import Deliver, Key
from prl.messages import GenerateRequest, Installed, WeightsRef
from prl_engine_vllm.generation import Generation


class Installs(Protocol):
    """What this needs of `prl_engine_vllm.install.Installer`."""

    version: int
    incarnation: int

    async def install(self, weights: WeightsRef) -> Installed: ...

    def info(self) -> dict[str, Any]: ...

    def gauges(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class VllmBackend:
    """A `prl.engine.backend.Backend`."""

    def __init__(self, generation: Generation, installer: Installs, about: dict[str, Any]) -> None:
        self._generation = generation
        self._installer = installer
        self._about = about
        self._pause_wanted = False

    @property
    def version(self) -> int:
        return self._installer.version

    @property
    def incarnation(self) -> int:
        return self._installer.incarnation

    def start(self, deliver: Deliver) -> None:
        self._generation.start(deliver)

    def add(self, requests: Sequence[tuple[Key, GenerateRequest]]) -> None:
        self._generation.add(requests)

    def abort(self, keys: Iterable[Key]) -> None:
        self._generation.abort(keys)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._generation.score(sequences)

    async def pause(self) -> None:
        self._pause_wanted = True
        await self._generation.pause()

    async def resume(self) -> None:
        self._pause_wanted = False
        await self._generation.go_on()

    async def sleep(self) -> None:
        await self._generation.sleep()

    async def wake(self) -> None:
        await self._generation.wake()
        if self._pause_wanted:
            await self._generation.pause()

    async def install(self, weights: WeightsRef) -> Installed:
        try:
            return await self._installer.install(weights)
        finally:
            if self._pause_wanted:  # the probes needed an engine that computes
                await self._generation.pause()

    @property
    def load(self) -> int:
        return self._generation.load

    @property
    def busy(self) -> float:
        return self._generation.gauges.busy

    def info(self) -> dict[str, Any]:
        return {"tokens": self._generation.gauges.tokens, **self._about, **self._installer.info()}

    def gauges(self) -> dict[str, float]:
        return {**self._generation.gauges.values(), **self._installer.gauges()}

    def close(self) -> None:
        self._installer.close()
