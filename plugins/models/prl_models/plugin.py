"""What this distribution contributes."""

from __future__ import annotations

from prl.contribution import Contribution

HF = Contribution(
    factory="prl_models.hf.provider:build",
    summary="Any causal language model of transformers, unmodified, on packed documents",
)
