"""What attention computed in a block's forward pass, kept for the block's recomputation in the backward pass.

Selective recomputation repeats everything of a block but its attention, whose cost grows with the square of a
document's length. An attention function calls `remembered` around its kernel; `selective` is the `context_fn` of
`torch.utils.checkpoint`: the first context keeps what the kernels return, the second hands it out again in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

Pair = tuple[Tensor, Tensor]

_recording: list[deque[Pair]] = []
_replaying: list[deque[Pair]] = []


def remembered(compute: Callable[[], Pair]) -> Pair:
    """`compute()`, or what it returned at this place of the forward pass. For the forward of an autograd.Function."""
    if _replaying:
        out, lse = _replaying[-1].popleft()
        return out.detach(), lse
    out, lse = compute()
    if _recording:
        _recording[-1].append((out.detach(), lse))  # detached: autograd makes `out` itself part of its graph
    return out, lse


def selective() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of one block's forward pass and of its recomputation."""
    kept: deque[Pair] = deque()
    return _within(_recording, kept), _within(_replaying, kept)


@contextmanager
def _within(stack: list[deque[Pair]], kept: deque[Pair]) -> Iterator[None]:
    stack.append(kept)
    try:
        yield
    finally:
        stack.pop()
