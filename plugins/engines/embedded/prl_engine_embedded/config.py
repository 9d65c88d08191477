"""The engine's own keys of the `[engine]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prl.contribution import PluginConfig


class EmbeddedConfig(PluginConfig):
    batching: Literal["auto", "fixed", "continuous"] = "auto"
    """"fixed" computes in fixed-shape batches, so that a request's tokens do not depend on its companions;
    "continuous" is transformers' own scheduler with a paged cache, on a CPU only; "auto" is fixed wherever the model
    allows it, and always on a GPU and when loop.max_staleness is 0."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes a GPU where there is one."""
    slots: int = Field(256, ge=8, le=4096)
    """Requests that are decoded at once at most. "fixed" has fewer where whole sequences in all of them would not fit
    into half of the free memory."""
    prefill_rows: int = Field(32, ge=8, le=512)
    """Prompts that one prefill pass computes, "fixed" only. Fewer than 8 would make results depend on the row."""
    max_sequence_tokens: int = Field(0, ge=0)
    """Prompt and completion together at most; 0 is what the model's configuration allows."""
    swap_kv: Literal["recompute", "retain"] = "recompute"
    """What happens to requests in flight when weights change: rebuild their keys and values, so that later tokens
    are exact samples of the new version, or keep the old ones, which is faster and approximate."""
    cache_tokens: int = Field(0, ge=0)
    """Tokens the paged cache of "continuous" holds; 0 leaves it to transformers on a GPU and is 65536 on a CPU."""

    @property
    def repeatable(self) -> bool:
        """Whether equal requests get equal answers: continuous batches change their shape, and share one generator."""
        return self.batching != "continuous"

    @property
    def context(self) -> tuple[str, int]:
        return "max_sequence_tokens", self.max_sequence_tokens
