"""The declaration behind the entry point. It imports nothing heavy."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_engine_vllm.config import VllmConfig

VLLM = Contribution(
    factory="prl_engine_vllm.engine:VllmEngine",
    config=VllmConfig,
    summary="vLLM, unmodified, under the interpreter that has it; every `vllm serve` argument is a key",
)
