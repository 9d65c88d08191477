"""Weights for the tests of channels: every type of number, odd bits, and what one step of training makes of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ODD_BITS = [0x7FC1, 0xFFC0, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x7F81]
"""bfloat16: NaNs with a payload, -0.0, 0.0, both infinities, a denormal, a signalling NaN."""


def weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 48, generator=random)
    return {
        "embed.weight": matrix.bfloat16(),
        "head.weight": matrix.bfloat16(),  # tied
        "large": torch.randn(40000, generator=random).bfloat16(),
        "odd": torch.tensor(ODD_BITS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16),
        "master": torch.randn(31, 7, generator=random),
        "turned": torch.randn(5, 3, generator=random).T,
        "half": torch.randn(3, generator=random).half(),
        "double": torch.randn(3, generator=random).double(),
        "scale": torch.tensor(2.5),
        "steps": torch.tensor(7),
        "mask": torch.rand(70, generator=random) > 0.5,
        "bytes": torch.randint(0, 255, (33,), generator=random, dtype=torch.uint8),
        "eighths": torch.randn(129, generator=random).to(torch.float8_e4m3fn),
        "fifths": torch.randn(65, generator=random).to(torch.float8_e5m2),
        "nothing": torch.zeros(0, 4),
    }


def stepped(former: Mapping[str, Tensor], seed: int, share: float = 0.02) -> dict[str, Tensor]:
    """The same with other bits in `share` of the elements."""
    random = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in former.items():
        flat = tensor.contiguous().reshape(-1).clone()
        chosen = torch.rand(flat.shape, generator=random) < share
        if tensor.dtype == torch.bool:
            flat = flat ^ chosen
        elif len(flat):
            bits = flat.view(torch.uint8).view(len(flat), -1)
            bits[:, 0] ^= chosen.to(torch.uint8)
        changed[name] = flat.view(tensor.shape)
    return changed
