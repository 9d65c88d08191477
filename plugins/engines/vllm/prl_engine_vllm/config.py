"""The engine's own keys of the `[engine]` table. Every other key is an argument of `vllm serve`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from prl.contribution import PluginConfig, wrong

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

OURS = {
    "model": "model.path says which model",
    "model_tag": "model.path says which model",
    "dtype": "model.dtype says which precision; quantization says what the engine makes of it",
    "seed": "every request has a random stream of its own, from the run's seed",
    "host": "api_host is this key",
    "port": "api_port is this key",
    "api_key": "the run's token is the key",
    "uds": "the process serves a port",
    "headless": "the process serves its engine itself",
    "api_server_count": "the process is the one server of its engine; engine.replicas makes more of them",
    "data_parallel_hybrid_lb": "engine.replicas makes further servers",
    "data_parallel_external_lb": "engine.replicas makes further servers",
    "logprobs_mode": "training needs the log-probabilities of what was sampled: processed_logprobs",
    "worker_extension_cls": "it brings the weights",
    "weight_transfer_config": "[channel] brings the weights",
    "generation_config": "what is sampled is what prl asks for",
    "override_generation_config": "what is sampled is what prl asks for",
    "skip_tokenizer_init": "the HTTP interface needs the tokenizer",
    "enable_sleep_mode": "sleep is this key",
    "config": "the keys of this table are the arguments",
}
"""Arguments that are not a user's to set, with the reason."""


class VllmConfig(PluginConfig):
    model_config = ConfigDict(extra="allow")

    takes_adapters: ClassVar[bool] = True
    can_sleep: ClassVar[bool] = True
    repeatable: ClassVar[bool] = False

    python: str = ""
    """The interpreter that has vLLM; empty: this one if it has, else $PRL_VLLM_PYTHON, else what `make vllm` made."""
    swap_kv: Literal["recompute", "retain"] = "recompute"
    """What happens to requests in flight when weights change: rebuild their keys and values, so that later tokens
    are exact samples of the new version, or keep the old ones, which is faster and approximate."""
    api_host: str = Field("127.0.0.1", min_length=1)
    """Where vLLM's own HTTP interface listens, with the run's token as its key."""
    api_port: int = Field(0, ge=0, le=65535)
    """Its port, counted upwards by replica; 0 takes a free one. The engine's log and status.json name it."""
    startup_timeout_s: float = Field(1800, gt=0)
    """An engine that is not ready by then has failed."""
    stall_timeout_s: float = Field(300, gt=0)
    """An engine that has requests and makes no token for so long ends itself, and is started again."""
    check: bool = True
    """Whether vLLM's own parser checks the arguments before anything starts. It takes half a minute the first time."""
    env: dict[str, str] = {}
    """Environment variables of the engine's process, such as VLLM_CPU_KVCACHE_SPACE (GiB)."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The `vllm serve` arguments that were given, under their names with underscores."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def context(self) -> tuple[str, int]:
        """The longest sequence, where the argument is a plain number and the model's own limit is not overridden."""
        longest, free = self.arguments.get("max_model_len"), "hf_overrides" not in self.arguments
        return "max_model_len", longest if type(longest) is int and longest > 0 and free else 0

    @property
    def quantized(self) -> str:
        """To what it makes smaller the weights that it receives, or its cache; "" for nothing."""
        found = self.arguments.get("quantization") or self.arguments.get("kv_cache_dtype") or ""
        return "" if found in ("auto", "bfloat16", "float32") else str(found)

    def problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """What vLLM itself would not start with, as (dotted key, message).

        Raises:
            EnvironmentNotFit: there is no vLLM to ask.
        """
        if not self.check:
            return iter(())
        # By name: a declaration imports nothing heavy, and this asks vLLM's interpreter.
        precheck = importlib.import_module("prl_engine_vllm.precheck")
        found: Iterator[tuple[str, str]] = precheck.problems(config, self)
        return found

    @model_validator(mode="after")
    def _not_ours(self) -> VllmConfig:
        for name in self.env:
            if not name or "=" in name:
                raise wrong("env", f"has {name!r}: no process can have a variable of that name")
        for key in self.arguments:
            name = key.replace("-", "_")
            if name in OURS:
                raise wrong(key, f"cannot be set: {OURS[name]}")
            if not key.isidentifier():
                raise wrong(key, f"is written {name!r}: the name of the `vllm serve` argument with underscores")
        return self
