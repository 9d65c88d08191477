"""From a configuration to a loaded model with its scheduler, and the channel that brings it new weights."""

from __future__ import annotations

import logging

import psutil  # type: ignore[import-untyped]
import torch

from prl.config.schema import RunConfig
from prl.errors import EnvironmentNotFit, UsageError
from prl.protocols import ChannelPlugin, ChannelReceiver
from prl_engine_embedded import fitness, fixed, slots
from prl_engine_embedded import model as models
from prl_engine_embedded.config import EmbeddedConfig
from prl_engine_embedded.engine import threads_of
from prl_engine_embedded.model import LoadedModel
from prl_engine_embedded.scheduler import Scheduler

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Of the free memory, for the keys and values of the fixed scheduler."""


def build_scheduler(config: RunConfig, own: EmbeddedConfig) -> tuple[LoadedModel, Scheduler]:
    """Load the model for the scheduler that the configuration asks for, and try it out.

    "auto" is fixed, which was 2 times faster than continuous on a CPU (256 short completions of a tiny model) and 5
    times on an H200 (512 completions of 256 tokens, 0.6 billion parameters), unless the model needs more than it can
    do. On a GPU there is nothing but fixed: see `_require_continuous`.

    Raises:
        UsageError: the model cannot be loaded, or cannot be served by this scheduler.
        EnvironmentNotFit: a GPU is asked for and there is none, or continuous batching cannot be used here.
    """
    threads = threads_of(config)
    if threads:
        torch.set_num_threads(threads)
    device = models.choose_device(own.device)
    repeatable = config.loop.max_staleness == 0
    if own.batching == "continuous":
        _require_continuous(device)
        return _continuous(config, own, device)
    may_choose = own.batching == "auto" and not repeatable and device.type == "cpu" and can_pause()
    slots.register()
    loaded = models.load(config.model, device, slots.ATTENTION, own.max_sequence_tokens)
    try:
        fitness.require_plain_attention(loaded)
    except UsageError as error:
        if not may_choose:
            raise
        log.warning("%s. batching = auto: so it is", error)
        return _continuous(config, own, device)
    # The number of rows may show in the bits of a result, so it must not depend on what else is in memory.
    count = own.slots if repeatable else fitting_slots(loaded, own.slots)
    if count < own.slots:
        log.warning(
            "%d slots instead of %d, so that sequences of %d tokens fit into half of the free memory: lower "
            "engine.max_sequence_tokens to have more",
            count,
            own.slots,
            loaded.max_tokens,
        )
    windows = rows = True
    if repeatable:
        fitness.warn_of_companions(loaded)
        windows = fitness.window_is_invisible(loaded)
        rows = all(fitness.rows_are_invisible(loaded, most) for most in (count, own.prefill_rows))
    log.info("batching = fixed on %s, %d slots", device, count)
    return loaded, fixed.FixedScheduler(loaded, count, own.prefill_rows, pinned_window=not windows, tiers=rows)


def _require_continuous(device: torch.device) -> None:
    """Raises:
    EnvironmentNotFit: transformers cannot, or cannot be trusted with weights that change.
    """
    if device.type != "cpu":
        raise EnvironmentNotFit(
            'engine.batching = "continuous" is for CPUs: on a GPU its log-probabilities are now and then not the '
            "trainer's while weights change (a mismatch KL of 0.83 at step 12 of a run, cause unknown): set "
            'batching = "fixed", or engine.use = "vllm"'
        )
    if not can_pause():
        raise EnvironmentNotFit(
            'engine.batching = "continuous" needs a transformers whose continuous batching can be paused (5.19 or '
            'newer): upgrade transformers, or set batching = "fixed"'
        )


def _continuous(config: RunConfig, own: EmbeddedConfig, device: torch.device) -> tuple[LoadedModel, Scheduler]:
    from prl_engine_embedded.continuous import ContinuousScheduler

    loaded = models.load(config.model, device, "sdpa", own.max_sequence_tokens)
    return loaded, ContinuousScheduler(loaded, own)


def can_pause() -> bool:
    """Whether transformers' continuous batching can stop between two tokens: weights are swapped there."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    return hasattr(ContinuousBatchingManager, "pause")


def fitting_slots(model: LoadedModel, wanted: int, free: float | None = None) -> int:
    """How many slots, `wanted` at most and 8 at least, can hold the longest sequence within a share of the memory.

    Args:
        free: bytes; None asks the machine.
    """
    if free is None:
        on_gpu = model.device.type == "cuda"
        free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
    slot = model.max_tokens * bytes_per_token(model)
    return max(fixed.MIN_ROWS, min(wanted, int(free * MEMORY_SHARE / slot) // fixed.MIN_ROWS * fixed.MIN_ROWS))


def bytes_per_token(model: LoadedModel) -> int:
    """Of keys and values in all layers."""
    config = model.module.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    element = next(model.module.parameters()).element_size()
    return int(2 * config.num_hidden_layers * key_heads * size * element)


def build_receiver(config: RunConfig) -> ChannelReceiver:
    channel: ChannelPlugin = config.channel.build()
    return channel.receiver()
