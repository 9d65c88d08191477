"""What attention computed in a block's forward pass, kept for the block's recomputation in the backward pass.

Selective recomputation repeats everything of a block but its attention, whose cost grows with the square of a
document's length. An attention function calls `remembered` around its kernel; `selective` is the `context_fn` of
`torch.utils.checkpoint`: the first context keeps what the kernels return, the second hands it out again in order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal

from torch import Tensor

Pair = tuple[Tensor, Tensor]


def remembered(compute: Callable[[], Pair]) -> Pair:
    """`compute()`, or what it returned at this place of the forward pass. For the forward of an autograd.Function."""
    if not _open:
        return compute()
    region = _open[-1]
    if region.mode == "replay":
        out, lse = region.kept[region.taken]
        region.taken += 1
        return out.detach(), lse.detach()
    out, lse = compute()
    region.kept.append((out.detach(), lse.detach()))  # detached: autograd makes `out` itself part of its graph
    return out, lse


def selective() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of one region's forward pass and of its recomputation, which may happen more than once and may stop
    early. What is kept goes when the region's graph does. A region within a region has its own."""
    kept: list[Pair] = []
    return _Region("record", kept), _Region("replay", kept)


class _Region:
    def __init__(self, mode: Literal["record", "replay"], kept: list[Pair]) -> None:
        self.mode = mode
        self.kept = kept
        self.taken = 0

    def __enter__(self) -> None:
        self.taken = 0
        _open.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _open.pop()


_open: list[_Region] = []
"""Regions being computed, the innermost last. One list for all threads: autograd runs a backward pass, and with it
recomputation, in a thread of its own while the caller waits."""
