"""Whether ranks can share the rows of a model, by its numbers alone; no torch."""

from __future__ import annotations

from math import lcm
from typing import Literal


def misfit(
    heads: int, kv_heads: int, cp: int, style: Literal["ulysses", "ring"], window: int | None = None
) -> tuple[str, str] | None:
    """Why `cp` ranks cannot share the rows of a model with so many heads, and layers with a sliding `window`: the key
    of `[trainer]` to change and what is wrong with it; None where they can."""
    if cp == 1:
        return None
    if style == "ring":
        if window is None:
            return None
        return "cp_style", (
            f'is "ring", which cannot compute the sliding window of {window} tokens that layers of this model have: '
            'use "ulysses"'
        )
    if heads % lcm(kv_heads, cp) == 0:
        return None
    fitting = [n for n in range(2, heads + 1) if heads % lcm(kv_heads, n) == 0]
    return "cp", (
        f"is {cp}, which cannot divide the {heads} attention heads of this model (with {kv_heads} key/value heads): "
        f'use cp = {", ".join(map(str, fitting)) or 1}, or cp_style = "ring"'
    )
