"""What the tests' engines have in their workers: ours, and a way to leave it out. It is imported by vLLM's workers."""

from __future__ import annotations

from typing import Any

from prl_engine_vllm import reload
from prl_engine_vllm.worker import WorkerExtension


class ForTests(WorkerExtension):
    """Can be told to add, once, nothing to vLLM's own reload."""

    def prl_plain_once(self) -> None:
        ours = reload._forget_moe_kernels, reload._pack_embeddings

        def back(model: Any) -> None:
            reload._forget_moe_kernels, reload._pack_embeddings = ours

        reload._forget_moe_kernels, reload._pack_embeddings = lambda model: None, back
