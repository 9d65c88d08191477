"""The declaration behind the entry point. It imports nothing heavy."""

from __future__ import annotations

from prl.contribution import Contribution
from prl_engine_embedded.config import EmbeddedConfig

EMBEDDED = Contribution(
    factory="prl_engine_embedded.engine:EmbeddedEngine",
    config=EmbeddedConfig,
    summary="any Hugging Face causal language model through transformers, on CPU or one GPU",
)
