"""What the tests' engines have in their workers: ours, and a way to leave it out. It is imported by vLLM's workers."""

from __future__ import annotations

from typing import Any

from prl_engine_vllm import reload
from prl_engine_vllm.worker import WorkerExtension


class ForTests(WorkerExtension):
    """Can be told to add, once, nothing to vLLM's own reload, and to spoil, once, what is loaded."""

    def prl_plain_once(self) -> None:
        ours = reload._forget_moe_kernels, reload._pack_embeddings

        def back(model: Any) -> None:
            reload._forget_moe_kernels, reload._pack_embeddings = ours

        reload._forget_moe_kernels, reload._pack_embeddings = lambda model: None, back

    def prl_spoil_once(self) -> None:
        ours = reload.reload

        def spoiled(worker: Any, tensors: Any) -> None:
            reload.reload = ours
            name = next(name for name in tensors if name.endswith("v_proj.weight"))
            ours(worker, {**tensors, name: -tensors[name]})

        reload.reload = spoiled
