"""How many programs a Triton kernel is launched with."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_WAVES = 4
"""Programs on each multiprocessor of kernels that sum over rows: enough to hide latency, few enough that the partial
sums are small (528 rows on an H200)."""


def persistent(tiles: int, device: torch.device) -> int:
    """Programs of a kernel whose programs go over all tiles together and keep one partial sum each."""
    return min(tiles, _WAVES * _multiprocessors(device))


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`; 1 for 0."""
    return 1 << max(0, value - 1).bit_length()


def rows_of(x: Tensor) -> Tensor:
    """[..., H] -> [N, H] with neighbours in the last dimension, a view where x allows it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
