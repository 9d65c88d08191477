"""The plugin: what the plan runs, and how to reach it. This module must not import torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prl.engine.client import WireEngineClient
from prl.plan import Resources, Role
from prl_engine_embedded.config import EmbeddedConfig

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


class EmbeddedEngine:
    def __init__(self, config: EmbeddedConfig) -> None:
        self.config = config

    def role(self, config: RunConfig) -> Role:
        return Role(
            name="engine",
            command=(sys.executable, "-m", "prl_engine_embedded", "{run_dir}", "{replica}"),
            replicas=config.engine.replicas,
            resources=Resources(gpus=int(self._wants_gpu()), threads=threads_of(config)),
            restart="on_failure",
        )

    def _wants_gpu(self) -> bool:
        # The launcher's process must not import torch, so look for the driver's device file.
        return self.config.device == "cuda" or (self.config.device == "auto" and Path("/dev/nvidia0").exists())

    def connect(self, address: str, token: str) -> WireEngineClient:
        return WireEngineClient(address, token)


def threads_of(config: RunConfig) -> int:
    """Threads of the numeric library, 0 for its own choice: one where a run is to be repeatable bit for bit."""
    return config.engine.threads or (1 if config.loop.max_staleness == 0 else 0)
