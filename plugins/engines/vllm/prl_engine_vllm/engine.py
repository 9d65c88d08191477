"""The plugin: what the plan runs, and how to reach it. Nothing here imports vLLM or torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prl import files, foreign, registry
from prl.engine.client import WireEngineClient
from prl.errors import EnvironmentNotFit
from prl.plan import Resources, Role
from prl_engine_vllm import interpreter
from prl_engine_vllm.config import VllmConfig

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
"""Their product is the number of GPUs of one replica."""


class VllmEngine:
    def __init__(self, config: VllmConfig) -> None:
        self.config = config

    def role(self, config: RunConfig) -> Role:
        python = interpreter.choose(self.config) or sys.executable
        links, module = "{run_dir}/engine/packages", ("-m", "prl_engine_vllm", "{run_dir}", "{replica}")
        return Role(
            name="engine",
            command=foreign.command(python, distributions(config), links, *module),
            replicas=config.engine.replicas,
            env=dict(self.config.env),
            resources=Resources(gpus=gpus_of(self.config), threads=config.engine.threads),
            restart="on_failure",
        )

    def installed(self) -> str:
        """For the doctor.

        Raises:
            EnvironmentNotFit: there is no vLLM.
        """
        python, versions = interpreter.found(self.config)
        return f"vLLM {versions['vllm']} with torch {versions['torch']} under {python}"

    def versions(self) -> dict[str, str]:
        """For `lock.json`: this interpreter need not be the one that has vLLM. Empty where there is none."""
        try:
            python, versions = interpreter.found(self.config)
        except EnvironmentNotFit:
            return {}
        return {"executable": python, **versions}

    def connect(self, address: str, token: str) -> WireEngineClient:
        return WireEngineClient(address, token)


def gpus_of(own: VllmConfig) -> int:
    """GPUs of one replica, 0 on a machine without any."""
    if own.arguments.get("device") == "cpu" or not Path("/dev/nvidia0").exists():
        return 0
    product = 1
    for key in SIZES:
        size = own.arguments.get(key, 1)
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def distributions(config: RunConfig) -> tuple[str, ...]:
    """What of this installation the engine's process needs: the core, this plugin, the channel's, and the trainer's,
    whose table says whether adapters are trained."""
    found = ["prl-core", "prl-engine-vllm"]
    for table in (config.channel, config.trainer):
        entry = None if files.is_reference(table.use) else registry.names(table.kind).get(table.use)
        found += [entry.distribution] if entry is not None else []
    return tuple(dict.fromkeys(found))
