"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution

HF = Contribution(
    factory="prl_models.hf.provider:build",
    summary="Any causal language model of transformers, unmodified, on packed documents",
)
LLAMA = Contribution(
    factory="prl_models.llama:build",
    summary="Llama, SmolLM, Mistral and Qwen2 on shared blocks, built for packed documents",
)
QWEN3 = Contribution(
    factory="prl_models.qwen3:build",
    summary="Qwen3 on shared blocks, built for packed documents",
)
