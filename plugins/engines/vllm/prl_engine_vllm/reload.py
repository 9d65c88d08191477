"""Putting tensors into vLLM's model, in place, between two forward passes of a worker.

vLLM's own `reload_weights` does the work: it slices each tensor for this worker's share, quantises what the engine
quantises, and keeps every address, so that captured graphs stay valid. Three things are added, each of which was
found by comparing log-probabilities with transformers:

* On a CPU a MoE layer skips the packing of its experts in every load but the first (mean |difference| 0.58 after a
  reload of the very same weights): its kernel is forgotten before, so that it is made anew.
* On a CPU a tied output head keeps the product that was packed at start-up (0.88): it is packed again afterwards.
* A load that breaks off leaves vLLM half way, and the next one would continue it: what it gathered is thrown away.

And one is left out: vLLM warns "Failed to load weights" of every layer that got nothing, of those too that are due
nothing (tables of rotary embeddings, an output head that is tied). Those are not counted as lacking anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from prl import faults
from prl.errors import WeightsError


@torch.no_grad()
def reload(worker: Any, tensors: Mapping[str, Tensor] | None) -> None:
    """Load `tensors`, by their names in a checkpoint; None loads the folder that the engine was started with.

    Raises:
        WeightsError: the model is in pieces now, and has to be loaded whole before anything is computed with it.
    """
    from vllm.config import set_current_vllm_config

    model = worker.model_runner.get_model()
    on_cpu = worker.device.type == "cpu"
    last: list[str] = ["the first tensor"]
    with set_current_vllm_config(worker.vllm_config):
        if on_cpu:
            _forget_moe_kernels(model)
        try:
            if tensors is None:
                with _looked_at(model, lambda: None):
                    worker.reload_weights()
            else:
                quantised = worker.model_config.quantization is not None
                with _looked_at(model, lambda: _require_complete(model, quantised)):
                    worker.reload_weights(weights_iterator=_watched(tensors, last))
        except Exception as error:
            _break_off(model, worker.model_config)
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"vLLM could not load {last[0]}: {type(error).__name__}: {error}") from error
        if on_cpu:
            _pack_embeddings(model)
        else:
            torch.cuda.synchronize(worker.device)


def _watched(tensors: Mapping[str, Tensor], last: list[str]) -> Iterator[tuple[str, Tensor]]:
    """By name, so that the tensors of a layer come together: vLLM finishes one layer before it begins the next."""
    middle = len(tensors) // 2
    for index, name in enumerate(sorted(tensors)):
        if index == middle:
            faults.point("engine.apply")
        last[0] = name
        yield name, tensors[name]


@contextmanager
def _looked_at(model: Any, check: Callable[[], None]) -> Iterator[None]:
    """Between vLLM's taking every tensor and its finishing, `check`, and settle which layers are due nothing."""
    load = model.load_weights

    def load_and_look(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        loaded = load(weights, *args, **kwargs)
        check()
        _expect_nothing_where_nothing_is_due(model)
        return loaded

    model.load_weights = load_and_look
    try:
        yield
    finally:
        del model.load_weights


def _require_complete(model: Any, quantised: bool) -> None:
    lacking = _lacking(model, quantised)
    if lacking:
        raise WeightsError(f"the weights do not fit the model: too little for {lacking[0]} ({len(lacking)} layers)")


def _lacking(model: Any, quantised: bool) -> list[str]:
    """Linear layers that were not filled. Others may rightly have padding, or nothing in a checkpoint."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not isinstance(layer, LinearBase) or not info.can_load() or not info.load_numel_total:
            continue
        if info.load_numel == 0 or (not quantised and info.load_numel < info.load_numel_total):
            found.append(name)
    return found


def _expect_nothing_where_nothing_is_due(model: Any) -> None:
    """Layers whose buffers are computed and that have no parameter, or share each with a layer that was filled. vLLM
    gives them their tensors back in any case, and warns where the number of elements that it expects is not 0."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = [(layer, get_layerwise_info(layer)) for layer in model.modules()]
    filled: set[int] = set()
    for layer, info in infos:
        if not info.can_load():
            filled |= {id(parameter) for parameter in layer.parameters(recurse=False)}
        elif info.load_numel:
            filled |= {id(parameter) for parameter in info.kernel_tensors[0].values()}
    for _, info in infos:
        if not info.can_load() or info.load_numel or info.kernel_tensors is None:
            continue
        parameters, buffers = info.kernel_tensors
        computed = buffers.keys() <= info.kernel_non_persistent_buffers
        if computed and all(id(parameter) in filled for parameter in parameters.values()):
            info.load_numel_total = 0


def _break_off(model: Any, model_config: Any) -> None:
    """Give every layer that is not finished its former tensors back."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights = []
            info.load_numel = info.load_numel_total = 0  # what was wrong is said by ours
    finalize_layerwise_reload(model, model_config)


def _forget_moe_kernels(model: Any) -> None:
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_embeddings(model: Any) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and getattr(layer, "quant_method", None) is not None:
            layer.quant_method.process_weights_after_loading(layer)
