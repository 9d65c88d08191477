"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lora:
    """y = W x + (alpha / rank) B A x, W frozen, for every layer whose last name is among `targets`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
