"""Run by test_kernels_triton.py in a process of its own, because Triton's interpreter is chosen when kernels are
imported: every Triton operation beside plain torch on a CPU. Prints {case: [relative error of each tensor]} as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.testing.numerics import relative_error
from prl_models.blocks import head
from prl_models.kernels import norm, softmax
from prl_models.kernels.triton_ops import TritonOps

EPS = 1e-6
ops = TritonOps()


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return weight.to(x.dtype) * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def compare(
    expected: Sequence[Tensor], found: Sequence[Tensor], inputs: Sequence[Tensor], used: Sequence[int] | None = None
) -> list[float]:
    """Errors of outputs, and of gradients from random ones of the outputs that are `used`."""
    used = range(len(expected)) if used is None else used
    gradients = [
        torch.randn(expected[i].shape[::-1]).to(expected[i].dtype).permute(*range(expected[i].ndim)[::-1]) for i in used
    ]
    wanted, got = (
        torch.autograd.grad([outputs[i] for i in used], inputs, gradients, retain_graph=True)
        for outputs in (expected, found)
    )
    pairs = [*zip(expected, found, strict=True), *zip(wanted, got, strict=True)]
    assert all(a.dtype == b.dtype for a, b in pairs), [(a.dtype, b.dtype) for a, b in pairs]
    return [relative_error(a, b) for a, b in pairs]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def norms(dtype: torch.dtype) -> dict[str, list[float]]:
    x, residual, weight = random(3, 7, 24, dtype=dtype), random(3, 7, 24, dtype=dtype), random(24, dtype=torch.float32)
    strided = random(24, 9, dtype=dtype)
    found = {
        "rms_norm": compare([norm_of(x, weight)], [ops.rms_norm(x, weight, EPS)], (x, weight)),
        "rms_norm of a transposed tensor": compare(
            [norm_of(strided.t(), weight)], [ops.rms_norm(strided.t(), weight, EPS)], (strided, weight)
        ),
    }
    total = x + residual
    for name, used in (("", None), (" without the sum's gradient", [0]), (" of the sum alone", [1])):
        inputs = (x, residual) if used == [1] else (x, residual, weight)
        outputs = ops.add_rms_norm(x, residual, weight, EPS)
        found[f"add_rms_norm{name}"] = compare([norm_of(total, weight), total], outputs, inputs, used)
    return found


def rotations(dtype: torch.dtype) -> dict[str, list[float]]:
    found = {}
    heads, kv_heads, dim, tokens = 19, 2, 12, 5
    q_weight, k_weight = random(dim, dtype=torch.float32), random(dim, dtype=torch.float32)
    for half in (0, 2, 6):
        angles = torch.randn(tokens, half)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        expected = [rotated(norm_of(q, q_weight), cos, sin), rotated(norm_of(k, k_weight), cos, sin), v]
        outputs = ops.qkv_norm_rope(qkv, heads, kv_heads, q_weight, k_weight, EPS, cos, sin)
        found[f"qkv_norm_rope {half}"] = compare(expected, outputs, (qkv, q_weight, k_weight))
        expected = [rotated(q, cos, sin), rotated(k, cos, sin), v]
        outputs = ops.qkv_norm_rope(qkv, heads, kv_heads, None, None, EPS, cos, sin)
        found[f"qkv_norm_rope {half} without norms"] = compare(expected, outputs, (qkv,))
        expected = [rotated(norm_of(q, q_weight), cos, sin), rotated(k, cos, sin), v]
        outputs = ops.qkv_norm_rope(qkv, heads, kv_heads, q_weight, None, EPS, cos, sin)
        found[f"qkv_norm_rope {half} with one norm"] = compare(expected, outputs, (qkv, q_weight))
    return found


def activations(dtype: torch.dtype) -> dict[str, list[float]]:
    gate_up = random(5, 60, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    return {"swiglu": compare([F.silu(gate) * up], [ops.swiglu(gate_up)], (gate_up,))}


def heads(dtype: torch.dtype) -> dict[str, list[float]]:
    """53 logits in blocks of 16; `KEPT_BYTES` of 0 makes them again in the backward pass."""
    softmax._BLOCK = 16
    found = {}
    hidden, weight = random(13, 8, dtype=dtype), random(53, 8, dtype=torch.float32)
    targets, temperatures = torch.randint(0, 53, (13,)), torch.rand(13) + 0.5
    logits = (hidden @ weight.to(dtype).t()).float() / temperatures[:, None]
    log_p = logits.log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    for name, kept, chunk in (("kept", 1 << 30, 0), ("kept in chunks", 1 << 30, 5), ("recomputed", 0, 5)):
        for outputs, used in (("both", [0, 1]), ("log-probabilities", [0]), ("entropy", [1])):
            head.KEPT_BYTES = kept
            values = head._FusedHead.apply(hidden, weight, targets, temperatures, chunk)
            found[f"head {name}, {outputs}"] = compare(expected, values, (hidden, weight), used)
    return found


def main() -> None:
    torch.manual_seed(0)
    norm._FORWARD, norm._BACKWARD = 128, 64  # several tiles, and several of them for a program
    parts: list[Callable[[torch.dtype], dict[str, list[float]]]] = [norms, rotations, activations, heads]
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    print(json.dumps({kind: {k: v for part in parts for k, v in part(dtype).items()} for kind, dtype in kinds.items()}))


if __name__ == "__main__":
    main()
