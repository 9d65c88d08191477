"""Ulysses (Jacobs et al. 2023, arXiv 2309.14509): ranks exchange tokens for heads around attention.

Outside attention a rank has T / n tokens of every head, inside it all T tokens of 1 / n of the heads. One all-to-all
brings queries, keys and values there, another one brings the result back; the backward pass does the reverse.

Where there are fewer key/value heads than ranks, or they do not divide, each is sent to all that need it: copies are
made while the send buffer is filled, and their gradients are summed.
"""

from __future__ import annotations

from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """q [T / n, heads, D], k and v [T / n, kv_heads, D] -> [T, heads / n, D] and [T, lcm(kv_heads, n) / n, D].

    `heads` must be a multiple of lcm(kv_heads, n): `context.check_heads`. The results are views of one buffer.
    """
    out: tuple[Tensor, Tensor, Tensor] = _TokensToHeads.apply(q, k, v, group)
    return out


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, heads / n, D] -> [T / n, heads, D]."""
    out: Tensor = _HeadsToTokens.apply(x, group)
    return out


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):  # type: ignore[no-untyped-def]
        size = dist.get_world_size(group)
        ctx.group, ctx.kv_heads = group, k.shape[1]
        ctx.copies = lcm(k.shape[1], size) // k.shape[1]
        return _to_heads((q, _copies(k, ctx.copies), _copies(v, ctx.copies)), group)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        q, k, v = _to_tokens(grads, ctx.group)
        if ctx.copies > 1:
            k, v = (x.unflatten(1, (ctx.kv_heads, ctx.copies)).sum(2) for x in (k, v))
        return q, k, v, None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return _to_tokens((x,), group)[0]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _to_heads((grad,), ctx.group)[0], None


def _copies(x: Tensor, number: int) -> Tensor:
    """Every head `number` times, without a copy in memory: [t, heads, number, D]."""
    return x[:, :, None].expand(-1, -1, number, -1)


def _to_heads(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Each [t, heads, (copies,) D] -> [n t, heads copies / n, D]."""
    size = dist.get_world_size(group)
    tokens = parts[0].shape[0]
    widths = [part[0].numel() // size for part in parts]
    send = parts[0].new_empty(size, tokens, sum(widths))
    for part, place in zip(parts, send.split(widths, 2), strict=True):
        heads = (part.shape[1:-1].numel() // size, part.shape[-1])
        # [t, n, heads / n, D]; for copies a reshape copies, as keys and values of few heads are small
        place.unflatten(2, heads).copy_(part.reshape(tokens, size, *heads).transpose(0, 1))
    received = _exchange(send, group).view(size * tokens, -1)
    pieces = received.split(widths, 1)
    return tuple(piece.unflatten(1, (-1, part.shape[-1])) for piece, part in zip(pieces, parts, strict=True))


def _to_tokens(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Each [n t, heads / n, D] -> [t, heads, D]."""
    size = dist.get_world_size(group)
    tokens = parts[0].shape[0] // size
    widths = [part[0].numel() for part in parts]
    send = parts[0].new_empty(size, tokens, sum(widths))
    for part, place in zip(parts, send.split(widths, 2), strict=True):
        place.unflatten(2, part.shape[1:]).copy_(part.unflatten(0, (size, tokens)))
    received = _exchange(send, group).transpose(0, 1)
    return tuple(
        piece.reshape(tokens, size * part.shape[1], part.shape[2])
        for piece, part in zip(received.split(widths, 2), parts, strict=True)
    )


def _exchange(send: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received
