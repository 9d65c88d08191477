"""What the head needs of its logits, in Triton: one read for the statistics, one read and write for the gradient.

With z = logits / temperature: the logarithm of the sum of exponentials, the entropy of softmax(z) and the target's
log-probability by an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) that also sums exp(z) z. The
gradient, see `prl_models.blocks.head`, overwrites the logits. Arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def statistics(logits: Tensor, targets: Tensor, temperatures: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> None:
    """Of logits [N, V], rows without gaps: log-probabilities of targets i64[N], entropies and the logarithms of the
    sums of exponentials, into the three of `out`, f32[N] each. temperatures: f32[N]."""
    count, vocabulary = logits.shape
    if count:
        _statistics_kernel[(count,)](
            logits, targets, temperatures, *out, vocabulary, logits.stride(0), BLOCK=_BLOCK, num_warps=_WARPS
        )


def gradient(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite logits [N, V] with their gradient; all others [N]."""
    count, vocabulary = logits.shape
    if count:
        _gradient_kernel[(count, triton.cdiv(vocabulary, _BLOCK))](
            logits,
            targets,
            temperatures,
            normaliser,
            entropy,
            grad_logprobs,
            grad_logprobs if grad_entropy is None else grad_entropy,
            vocabulary,
            logits.stride(0),
            ENTROPY=grad_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


@triton.jit
def _statistics_kernel(
    logits, targets, temperatures, logprobs, entropy, normaliser, vocabulary, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    per_logit = 1.0 / tl.load(temperatures + row)
    column = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    sums, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < vocabulary:
        mask = start + column < vocabulary
        z = tl.load(logits + start + column, mask, float("-inf")).to(tl.float32) * per_logit
        before = largest
        largest = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(before - largest)
        p = tl.exp(z - largest)
        sums = sums * shrink + p
        weighted = weighted * shrink + tl.where(p > 0.0, p * z, 0.0)
        start += BLOCK
    total = tl.sum(sums, 0)
    lse = largest + tl.log(total)
    target = tl.load(logits + tl.load(targets + row)).to(tl.float32) * per_logit
    tl.store(normaliser + row, lse)
    tl.store(logprobs + row, target - lse)
    tl.store(entropy + row, lse - tl.sum(weighted, 0) / total)


@triton.jit
def _gradient_kernel(
    logits,
    targets,
    temperatures,
    normaliser,
    entropy,
    grad_logprobs,
    grad_entropy,
    vocabulary,
    stride,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocabulary
    per_logit = 1.0 / tl.load(temperatures + row)
    a = tl.load(grad_logprobs + row).to(tl.float32) * per_logit
    log_p = tl.load(logits + column, mask, float("-inf")).to(tl.float32) * per_logit - tl.load(normaliser + row)
    p = tl.exp(log_p)
    slope = a
    if ENTROPY:
        b = tl.load(grad_entropy + row).to(tl.float32) * per_logit
        slope += b * tl.where(p > 0.0, log_p + tl.load(entropy + row), 0.0)
    grad = tl.where(column == tl.load(targets + row), a, 0.0) - p * slope
    tl.store(logits + column, grad.to(logits.dtype.element_ty), mask)
