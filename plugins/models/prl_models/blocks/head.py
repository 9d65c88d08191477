"""Log-probabilities and entropies of chosen tokens, with gradients, without a [T, V] matrix in float32.

The head's logits are made, used and dropped chunk by chunk, and made again in the backward pass. Recomputing costs
8 H V operations a token instead of 6; where all logits fit `KEPT_BYTES` (on CUDA; in one chunk on CPU) they are kept
instead: 4.6 GiB for a vocabulary of 151,936 at 16,384 tokens in bfloat16.

With z = h w^T / temperature, p = softmax(z), H = -sum p log p, and the incoming gradients a (of the log-probability)
and b (of the entropy):  dz = a (onehot - p) - b p (log p + H).

On CUDA `prl_models.kernels.softmax` reads logits once for all statistics, and turns them into their gradient in place.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 23
"""Logits of a chunk on CPU: 32 MiB in float32."""
CUDA_BYTES = 2 << 30
"""Logits of a chunk on CUDA: 7,067 tokens of a vocabulary of 151,936 in bfloat16. Each chunk reads and writes the
gradient of the weight once more: 1.2 GB at 1,024 wide, 0.3 ms on an H200."""
KEPT_BYTES = 6 << 30
"""Logits that are kept for the backward pass on CUDA."""


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int = 0, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p, p = softmax(hidden weight^T / temperature).

    Args:
        hidden: [N, H]. weight: [V, H], cast where its precision is another. targets: i64[N].
        temperatures: f32[N], all above 0.
        chunk: tokens whose logits exist at once; 0 chooses by the vocabulary and the device.
        fused: on CUDA, use Triton's kernels where Triton is installed.

    Returns:
        Log-probabilities and entropies in nats, [N] each, both differentiable, float32 (float64 for float64 inputs).
    """
    if fused and hidden.is_cuda and hidden.dtype != torch.float64 and find_spec("triton") is not None:
        logprobs, entropy = _FusedHead.apply(hidden, weight, targets, temperatures, chunk)
        return logprobs, entropy
    if chunk <= 0:
        chunk = max(16, (CUDA_BYTES // 4 if hidden.is_cuda else CPU_ELEMENTS) // weight.shape[0])
    logprobs, entropy = _ChunkedHead.apply(hidden, weight.to(hidden.dtype), targets, temperatures, chunk)
    return logprobs, entropy


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, chunk):  # type: ignore[no-untyped-def]
        ctx.weight_kind, weight = weight.dtype, weight.to(hidden.dtype)
        count = hidden.shape[0]
        kind = torch.promote_types(hidden.dtype, torch.float32)
        temperatures = temperatures.to(kind)[:, None]
        logprobs, entropy = (hidden.new_empty(count, dtype=kind) for _ in range(2))
        normaliser = hidden.new_empty(count, 1, dtype=kind)
        kept = None
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            log_p = _logits(hidden[part], weight, temperatures[part])
            normaliser[part] = torch.logsumexp(log_p, -1, keepdim=True)
            log_p -= normaliser[part]
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            p = log_p.exp()
            entropy[part] = -torch.linalg.vecdot(p, log_p)
            kept = (log_p, p)
        ctx.kept = kept if count <= chunk and any(ctx.needs_input_grad) else None
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, temperatures, normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, targets, temperatures, normaliser, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden = torch.empty_like(hidden)
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if trained else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            if ctx.kept is not None:
                log_p, p = ctx.kept
                ctx.kept = None
            else:
                log_p = _logits(hidden[part], weight, temperatures[part]).sub_(normaliser[part])
                p = log_p.exp()
            a = (grad_logprobs[part, None] / temperatures[part]).to(p.dtype)
            if grad_entropy is None:
                grad = p.mul_(-a)
            else:  # p (a + b (log p + H)), negated, plus a at the target
                b = (grad_entropy[part, None] / temperatures[part]).to(p.dtype)
                grad = log_p.add_(entropy[part, None]).mul_(b).add_(a).mul_(p).neg_()
            grad.scatter_add_(1, targets[part, None], a)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is None:
                continue
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.weight_kind), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """[chunk, V] in float32 at least: the product in the model's own precision, as an inference engine computes it."""
    return (hidden @ weight.t()).to(temperatures.dtype).div_(temperatures)


class _FusedHead(torch.autograd.Function):
    """The same on CUDA: logits in the model's precision, float32 only within the kernels that read them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, chunk):  # type: ignore[no-untyped-def]
        from prl_models.kernels.softmax import statistics

        count, vocabulary = hidden.shape[0], weight.shape[0]
        row_bytes = vocabulary * hidden.element_size()
        keep = any(ctx.needs_input_grad) and count * row_bytes <= KEPT_BYTES
        chunk = chunk if chunk > 0 else max(1, count) if keep else _even(count, CUDA_BYTES // row_bytes)
        temperatures, cast = temperatures.float(), weight.to(hidden.dtype)
        logprobs, entropy, normaliser = (hidden.new_empty(count, dtype=torch.float32) for _ in range(3))
        logits = hidden.new_empty(count if keep else min(chunk, count), vocabulary)
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            some = logits[part] if keep else logits[: part.stop - start]
            torch.mm(hidden[part], cast.t(), out=some)
            statistics(some, targets[part], temperatures[part], (logprobs[part], entropy[part], normaliser[part]))
        ctx.kept = logits if keep else None
        ctx.chunk, ctx.kind = chunk, weight.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, cast, targets, temperatures, normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        from prl_models.kernels.softmax import gradient

        hidden, weight, targets, temperatures, normaliser, entropy = ctx.saved_tensors
        count, chunk, kept = len(hidden), ctx.chunk, ctx.kept
        if kept is not None:
            chunk, ctx.kept = max(1, count), None  # overwritten below; another pass would make them again
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        logits = kept if kept is not None else hidden.new_empty(min(chunk, count), weight.shape[0])
        for start in range(0, count, chunk):
            part = slice(start, min(start + chunk, count))
            some = logits[: part.stop - start]
            if kept is None:
                torch.mm(hidden[part], weight.t(), out=some)
            of_rows = (targets[part], temperatures[part], normaliser[part], entropy[part], grad_logprobs[part])
            gradient(some, *of_rows, None if grad_entropy is None else grad_entropy[part])
            torch.mm(some, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                kind = ctx.kind if chunk >= count else torch.float32
                grad_weight = _add_product(grad_weight, some.t(), hidden[part], kind)
        if ctx.needs_input_grad[1] and grad_weight is None:  # no rows: other ranks reduce a gradient all the same
            grad_weight = torch.zeros_like(weight, dtype=ctx.kind)
        return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.kind), None, None, None


def _even(count: int, most: int) -> int:
    """The size of equal chunks of at most `most`, whole tiles of 128 where that leaves more than one tile."""
    most = max(128, most // 128 * 128)
    each = -(-count // max(1, -(-count // most)))
    return max(1, min(most, -(-each // 128) * 128))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a b in `dtype`, float32 or that of a and b; in place, in the product's own pass where torch can."""
    if a.dtype == dtype:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        a, b = a.to(dtype), b.to(dtype)
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    if _adds_wider(a.dtype):
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    return total.add_(torch.mm(a, b, out_dtype=dtype))


@cache
def _adds_wider(dtype: torch.dtype) -> bool:
    """Whether addmm adds a product of halves to a float32 matrix: not every torch that has `out_dtype` does."""
    a, total = torch.ones(16, 16, dtype=dtype, device="cuda"), torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool(total[0, 0] == 17.0)
