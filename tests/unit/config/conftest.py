"""Plugins to configure, without any installed package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field

from prl import registry
from prl.config.tables import Table
from prl.contribution import Contribution, PluginConfig
from prl.plan import GpuNeed


class Env(PluginConfig):
    length: int = Field(5, ge=1)
    """Characters of a text."""
    words: tuple[str, ...] = ()
    """What it is made of."""


class Engine(PluginConfig):
    batching: str = "fixed"
    memory: float = 0.9

    @property
    def repeatable(self) -> bool:
        return self.batching == "fixed"


class Adapters(Table):
    """Small matrices beside large ones."""

    rank: int = 16
    """Rows of one, columns of the other."""


class Trainer(PluginConfig):
    adapters: Adapters | None = None
    kernels: Literal["auto"] | Adapters = "auto"


class OnGpu(PluginConfig):
    device: str = "auto"


class BetweenGpus(PluginConfig):
    gpus: ClassVar[GpuNeed] = "required"


class Algorithm(PluginConfig):
    min_members: ClassVar[int] = 2


PLUGINS = {
    ("envs", "hello"): Contribution("builtins:id", Env, "Says hello."),
    ("engines", "embedded"): Contribution("builtins:id", Engine, "In this process."),
    ("algorithms", "grpo"): Contribution("builtins:id", Algorithm),
    ("losses", "dppo"): Contribution("builtins:id"),
    ("losses", "ce"): Contribution("builtins:id"),
    ("trainers", "fsdp"): Contribution("builtins:id", Trainer),
    ("channels", "filesystem"): Contribution("builtins:id"),
    ("engines", "on_gpu"): Contribution("builtins:id", OnGpu),
    ("trainers", "on_gpu"): Contribution("builtins:id", OnGpu),
    ("channels", "between"): Contribution("builtins:id", BetweenGpus),
    ("launchers", "local"): Contribution("builtins:id"),
}


@pytest.fixture(autouse=True)
def plugins() -> Iterator[None]:
    with ExitStack() as stack:
        for (kind, name), contribution in PLUGINS.items():
            stack.enter_context(registry.override(kind, name, contribution))
        yield


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a file into the working directory of the test and return its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str, name: str = "run.toml") -> str:
        Path(name).write_text(text)
        return name

    return write_file
