"""The peer of `trainer_peer.py`: `trainer_peer_worker.py REQUEST BACKEND PRECISION [PROFILE]`.

transformers' own model, unmodified, with what its users would add: every decoder layer under torch.compile (static
shapes), FlashAttention 4 through `AttentionInterface` as a custom operation, so that nothing breaks the graph, and a
head in chunks of 2,048 tokens, compiled as well and computed again in the backward pass. "full" recomputation is
`torch.utils.checkpoint` around every compiled layer. PRECISION "masters": bfloat16 parameters and gradients for the
products, float32 masters and moments in a fused AdamW that are copied back after every step; "bfloat16": all of it in
bfloat16. Loss, rows, clock and arithmetic are prl's.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from prl.config.bench import BenchConfig
from prl.config.load import read_resolved
from prl.flops import step_flops
from prl.loss import LossInputs
from prl.rows import PackedRow
from prl_trainer_fsdp.bench.data import denominators, synthetic_rows, with_sampler
from prl_trainer_fsdp.bench.parts import Clock, kernel_times, measure, profiled, save_profile
from prl_trainer_fsdp.bench.run import model_name, report, result
from prl_trainer_fsdp.bench.shapes import shapes_of
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.parallel.runtime import start

HEAD_CHUNK = 2048
ATTENTION = "peer_packed"
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


# --- attention over packed documents, opaque to the compiler ----------------------------------------------


@torch.library.custom_op("prl_peer::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, heads, D], k and v [T, kv_heads, D] -> out [T, heads, D] and lse f32[heads, T]."""
    if q.is_cuda:
        from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found]

        found = _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=True,
            return_lse=True,
        )
        return found[0], found[1]
    return _each_document(q, k, v, bounds, scale), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("prl_peer::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        from flash_attn.cute.interface import _flash_attn_bwd

        found = _flash_attn_bwd(
            q,
            k,
            v,
            out,
            grad.contiguous(),
            lse,
            scale,
            True,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
        return found[0], found[1], found[2]
    parts = [_document_backward(*one, scale) for one in _documents(bounds, grad, q, k, v)]
    dq, dk, dv = (torch.cat(found) for found in zip(*parts, strict=True))
    return dq, dk, dv


@attend_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, longest, scale = inputs
    ctx.save_for_backward(q, k, v, *output, bounds)
    ctx.longest, ctx.scale = longest, scale


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bounds = ctx.saved_tensors
    return (*attend_backward(grad, q, k, v, out, lse, bounds, ctx.longest, ctx.scale), None, None, None)


attend.register_autograd(_backward, setup_context=_keep)


def _documents(bounds: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """[T, heads, D] each -> [heads, length, D] of every document."""
    lengths = bounds.diff().tolist()
    return list(zip(*([part.transpose(0, 1) for part in x.split(lengths)] for x in tensors), strict=True))


def _each_document(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
    parts = [
        F.scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=True).transpose(0, 1)
        for one in _documents(bounds, q, k, v)
    ]
    return torch.cat(parts)


def _document_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Written out: without a GPU, where only small sizes are tried. An operation has no autograd inside."""
    groups = len(q) // len(k)
    keys, values = (x.repeat_interleave(groups, 0).float() for x in (k, v))
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu_(1)
    p = (scale * q.float() @ keys.transpose(1, 2)).masked_fill_(hidden, float("-inf")).softmax(-1)
    ds = p * (grad.float() @ values.transpose(1, 2))
    ds = scale * (ds - p * ds.sum(-1, keepdim=True))
    dk, dv = ds.transpose(1, 2) @ q.float(), p.transpose(1, 2) @ grad.float()
    dk, dv = (x.unflatten(0, (len(k), groups)).sum(1) for x in (dk, dv))
    found = [x.to(q.dtype).transpose(0, 1).contiguous() for x in (ds @ keys, dk, dv)]
    return found[0], found[1], found[2]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers calls it: [1, heads, T, D] -> [1, T, heads, D]."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out, _ = attend(q, k, v, kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs["scaling"])
    return out[None], None


# --- model, head, optimiser -------------------------------------------------------------------------------


def build(config: BenchConfig, recompute: str, compiled: Compile, device: torch.device) -> Any:
    AttentionInterface.register(ATTENTION, attention)
    shapes = shapes_of(config.bench.shapes)
    torch.manual_seed(config.seed)
    with torch.device(device):
        known = AutoConfig.for_model(shapes.pop("model_type"), **shapes)
        model = AutoModelForCausalLM.from_config(known, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    for layer in model.model.layers:
        layer.forward = compiled(layer.forward)
        if recompute == "full":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model.train()


def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of every label, and entropy without gradient: [n, H] -> f32[n] each."""
    logits = (hidden @ weight.t()).float()
    normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(1, labels[:, None])[:, 0] - normaliser
    still, total = logits.detach(), normaliser.detach()
    entropy = total - (torch.exp(still - total[:, None]) * still).sum(-1)
    return logprobs, entropy


class Masters:
    """AdamW over float32 copies of bfloat16 parameters; over the parameters themselves with `precision` "bfloat16"."""

    def __init__(self, parameters: list[nn.Parameter], config: FsdpConfig, precision: str) -> None:
        self.parameters = parameters
        self.masters = parameters
        if precision == "masters":
            self.masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        on_gpu = parameters[0].is_cuda
        self.limit = config.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=on_gpu
        )

    def step(self) -> float:
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.limit, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        return float(norm)


class Peer:
    def __init__(
        self, config: BenchConfig, own: FsdpConfig, backend: str, precision: str, device: torch.device
    ) -> None:
        compiled = cast(
            Compile,
            (lambda f: f)
            if backend == "none"
            else functools.partial(torch.compile, backend=backend, dynamic=False, fullgraph=True),
        )
        self.device = device
        self.model = build(config, own.recompute, compiled, device)
        self.head = compiled(head)
        self.masters = Masters(list(self.model.parameters()), own, precision)
        self.loss = config.loss.build()

    def step(self, row: PackedRow, whole: dict[str, float], clock: Clock) -> None:
        clock.mark("rows")
        inputs = self.on_device(row)
        clock.mark("forward")
        logprobs, entropy = self.forward(inputs, int(np.diff(row.cu_seqlens).max()))
        outputs = self.loss(
            LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                sampler_logprobs=inputs["logprobs"],
                advantages=inputs["advantages"],
                rl_weights=inputs["rl"],
                ce_weights=inputs["ce"],
                ref_kl_weights=inputs["ref_kl"],
                sampled=inputs["sampled"],
                versions=inputs["versions"],
                cu_seqlens=inputs["cu_seqlens"],
                version=0,
                denominators=whole,
            )
        )
        clock.mark("backward")
        outputs.loss.backward()
        clock.mark("optimizer")
        norm = self.masters.step()
        if not np.isfinite(norm):
            raise RuntimeError(f"the peer's gradient has norm {norm}")

    def forward(self, inputs: dict[str, Tensor], longest: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies f32[T] of every token given those before it; whatever stands at a document's
        first token has no weight."""
        ids = inputs["token_ids"]
        bounds = inputs["cu_seqlens"]
        hidden = self.model.model(
            input_ids=ids[None],
            position_ids=inputs["position_ids"][None],
            attention_mask=None,
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        ).last_hidden_state[0]
        weight, labels = self.model.lm_head.weight, ids.roll(-1)
        parts = [
            checkpoint(self.head, piece, weight, wanted, use_reentrant=False, preserve_rng_state=False)
            for piece, wanted in zip(hidden.split(HEAD_CHUNK), labels.split(HEAD_CHUNK), strict=True)
        ]
        logprobs, entropy = (torch.cat(found) for found in zip(*parts, strict=True))
        return logprobs.roll(1), entropy.roll(1)

    def on_device(self, row: PackedRow) -> dict[str, Tensor]:
        arrays = {name: value for name, value in vars(row).items() if isinstance(value, np.ndarray)}
        found = {name: torch.from_numpy(value.copy()).to(self.device) for name, value in arrays.items()}
        return {**found, **{name: found[name].long() for name in ("token_ids", "position_ids")}}


def main(request: Path, backend: str, precision: str, profile: Path | None) -> None:
    config = read_resolved(request, BenchConfig)
    own = cast(FsdpConfig, config.trainer.plugin_config())
    runtime = start(config)
    peer = Peer(config, own, backend, precision, runtime.device)
    shapes = shapes_of(config.bench.shapes)
    vocab_size = int(shapes["vocab_size"])

    def near_uniform(documents: Any) -> list[list[float]]:
        """Random weights give every token about the same probability."""
        return [[-float(np.log(vocab_size))] * len(document) for document in documents]

    (row,) = synthetic_rows(config.bench, vocab_size, (config.seed, 0))
    row = with_sampler(row, near_uniform, (config.seed, 0))
    whole = denominators([row], 1)

    def step(clock: Clock) -> None:
        peer.step(row, whole, clock)

    measured = measure(step, runtime.device, config.bench.warmup, config.bench.steps)
    flops = step_flops(shapes, [config.bench.documents])
    found = {
        "trainer": "transformers",
        "model": model_name(config),
        "seq_len": sum(config.bench.documents),
        "documents": list(config.bench.documents),
        "recompute": own.recompute,
        "kernels": {
            "attention": "flash4" if runtime.device.type == "cuda" else "sdpa",
            "operations": backend,
            "impl": "transformers",
            "compile": backend != "none",
        },
        "dtype": "bfloat16",
        "precision": precision,
        "optimizer": "adamw",
        "rows": 1,
        "lora": 0,
        **result(measured, flops, runtime, float(row.num_tokens)),
    }
    if profile is not None:
        trace = profiled(step, runtime.device)
        save_profile(trace, profile)
        found["profile_ms"] = kernel_times(trace)
    print(report(found), flush=True)
    request.with_name("rows.json").write_text(json.dumps([found], indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]) if len(sys.argv) > 4 else None)
