"""Log-probabilities and entropies of chosen tokens, with gradients, without a [T, V] matrix.

The head's logits are made, used and dropped chunk by chunk, and made again in the backward pass: memory is two or three
[chunk, V] matrices. Recomputing costs 8 H V operations a token instead of 6; where everything fits into one chunk the
probabilities are kept instead. A vocabulary of 151,936 at 16,384 tokens would otherwise need 9.3 GiB for one matrix.

With z = h w^T / temperature, p = softmax(z), H = -sum p log p, and the incoming gradients a (of the log-probability)
and b (of the entropy):  dz = a (onehot - p) - b p (log p + H).
"""

from __future__ import annotations

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 23
"""Logits of a chunk on CPU: 32 MiB in float32."""
CUDA_ELEMENTS = 1 << 27
"""Logits of a chunk on CUDA: 512 MiB in float32, 883 tokens of a vocabulary of 151,936."""


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p, p = softmax(hidden weight^T / temperature).

    Args:
        hidden: [N, H]. weight: [V, H]. targets: i64[N]. temperatures: f32[N], all above 0.
        chunk: tokens whose logits exist at once; 0 chooses by the vocabulary and the device.

    Returns:
        Log-probabilities and entropies in nats, [N] each, both differentiable, float32 (float64 for float64 inputs).
    """
    if chunk <= 0:
        chunk = max(16, (CUDA_ELEMENTS if hidden.is_cuda else CPU_ELEMENTS) // weight.shape[0])
    logprobs, entropy = _ChunkedHead.apply(hidden, weight, targets, temperatures, chunk)
    return logprobs, entropy


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, chunk):  # type: ignore[no-untyped-def]
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
        ctx.save_for_backward(hidden, weight, targets, temperatures, normaliser, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, targets, temperatures, normaliser, entropy = ctx.saved_tensors
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
            b = (grad_entropy[part, None] / temperatures[part]).to(p.dtype)
            # p (a + b (log p + H)), negated, plus a at the target
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
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """[chunk, V] in float32 at least: the product in the model's own precision, as an inference engine computes it."""
    return (hidden @ weight.t()).to(temperatures.dtype).div_(temperatures)
