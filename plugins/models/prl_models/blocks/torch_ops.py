"""`Ops` in plain torch: the reference that the fused ones are held against, and what a CPU runs.

The order of operations is that of transformers' modules, so that log-probabilities are theirs bit for bit, also in
bfloat16: a norm multiplies by its weight after rounding to x's precision, a rotation rounds both of its products.
Gradients are written out: half as many passes over the activations as autograd takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchOps:
    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = _RmsNorm.apply(x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = _AddRmsNorm.apply(x, residual, weight, eps)
        return normed, total

    def qkv_norm_rope(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _QkvNormRope.apply(qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        out: Tensor = _SwiGlu.apply(gate_up)
        return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        out, root = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, root)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, root = ctx.saved_tensors  # once: recomputation hands each out only once
        grad_x, products = _norm_backward(grad, x, weight, root)
        return grad_x, _over_tokens(products, weight), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):  # type: ignore[no-untyped-def]
        total = residual + x
        out, root = _norm(total, weight, eps)
        ctx.save_for_backward(total, weight, root)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx, grad, grad_total):  # type: ignore[no-untyped-def]
        if grad is None:
            return grad_total, grad_total, None, None
        total, weight, root = ctx.saved_tensors
        grad_x, products = _norm_backward(grad, total, weight, root)
        if grad_total is not None:
            grad_x += grad_total
        return grad_x, grad_x, _over_tokens(products, weight), None


class _QkvNormRope(torch.autograd.Function):
    """Queries and keys are treated together: [T, heads + kv_heads, D]."""

    @staticmethod
    def forward(ctx, qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin):  # type: ignore[no-untyped-def]
        whole = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
        rotated, v = whole.split((heads + kv_heads, kv_heads), dim=1)
        kept: tuple[Tensor, ...] = ()
        if q_weight is not None:
            weight = torch.stack([*[q_weight] * heads, *[k_weight] * kv_heads])
            normed, root = _norm(rotated, weight, eps)
            kept = (rotated, weight, root)
            rotated = normed
        ctx.save_for_backward(cos, sin, *kept)
        ctx.heads, ctx.kv_heads, ctx.shape = heads, kv_heads, qkv.shape
        out = _rotated(rotated, cos, sin)
        q, k = out.split((heads, kv_heads), dim=1)
        return q, k, v

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):  # type: ignore[no-untyped-def]
        cos, sin, *kept = ctx.saved_tensors
        heads, both = ctx.heads, ctx.heads + ctx.kv_heads
        grad = grad_q.new_empty(ctx.shape).unflatten(-1, (both + ctx.kv_heads, -1))
        _rotated(grad_q, cos, -sin, out=grad[:, :heads])
        _rotated(grad_k, cos, -sin, out=grad[:, heads:both])
        grad[:, both:] = grad_v
        grad_q_weight = grad_k_weight = None
        if kept:
            grad_x, products = _norm_backward(grad[:, :both], *kept)
            grad[:, :both] = grad_x
            grad_weight = products.sum(0)
            grad_q_weight = grad_weight[:heads].sum(0).to(kept[1].dtype)
            grad_k_weight = grad_weight[heads:].sum(0).to(kept[1].dtype)
        return grad.flatten(1), None, None, grad_q_weight, grad_k_weight, None, None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):  # type: ignore[no-untyped-def]
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x [..., H], and 1 / rms [..., 1] in float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * (wide * root).to(x.dtype), root


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and for every token that of the weight, in the precision of `root`.

    With n = x / rms and g the gradient of n:  dx = (g - n mean(g n)) / rms.
    """
    normed = x.to(root.dtype) * root
    wide = grad.to(root.dtype)
    products = wide * normed
    grad_normed = wide * weight.to(x.dtype)
    mean = torch.linalg.vecdot(grad_normed, normed)[..., None].div_(x.shape[-1])
    grad_x = grad_normed.sub_(normed.mul_(mean)).mul_(root)
    return grad_x.to(x.dtype), products


def _over_tokens(products: Tensor, weight: Tensor) -> Tensor:
    return products.flatten(0, -2).sum(0).to(weight.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotation by halves of the first 2 R dimensions of x [T, heads, D]; cos and sin [T, R]."""
    half = cos.shape[-1]
    twice, sin = torch.cat([cos, cos], -1)[:, None], sin[:, None]
    if out is None:
        out = x.new_empty(x.shape)
    torch.mul(x[..., : 2 * half], twice, out=out[..., : 2 * half])
    first, second = x[..., :half], x[..., half : 2 * half]
    if x.dtype in (torch.float32, torch.float64):
        out[..., :half].addcmul_(second, sin, value=-1)
        out[..., half : 2 * half].addcmul_(first, sin)
    else:  # transformers rounds the product before the sum
        out[..., :half].sub_(second * sin)
        out[..., half : 2 * half].add_(first * sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
