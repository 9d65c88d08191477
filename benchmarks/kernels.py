"""What attention, operations, the head and products cost on one NVIDIA GPU, beside what the machine can do.

    python benchmarks/kernels.py [--seconds 55] [--only ops,head,products,attention] [--out results.json]

Shapes are those of one layer of Qwen3-0.6B and a row of 16,384 tokens in bfloat16. Each figure is the median of ten
runs with a cold cache; the first run, which compiles, is not counted, but what it took is shown. Kernels that are not
installed or fail are reported as rows and passed over, and so is what would begin after `--seconds`.

Bytes are those that must be read and written once; the percentages are of 4.3 TB/s and 790 TFLOP/s, which an H200 gives
to a copy and to a large product.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl_models.blocks import head
from prl_models.blocks.kernel import Spans
from prl_models.blocks.torch_ops import TorchOps
from prl_models.kernels import choose_attention

TOKENS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 16384, 1024, 3072, 16, 8, 128, 151936
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12
MIXES = {
    "1 x 16,384": [16384],
    "4 x 4,096": [4096] * 4,
    "16 x 1,024": [1024] * 16,
    "mixed": [6000, 200, 3000, 1500, 700, 2500, 484, 2000],
}
KERNELS = ("flash4", "flash2", "varlen", "cudnn", "flex")
CUDA = torch.device("cuda")


@dataclass
class Clock:
    """Until when something new may begin, and the buffer that evicts the cache between runs."""

    end: float
    evict: Tensor

    def measure(self, run: Callable[[], Any], repeats: int = 10) -> tuple[float, float]:
        """(median seconds on the GPU, seconds that the first run took). The GPU is kept busy while a run is enqueued,
        so that what the host does is not counted."""
        begin = time.monotonic()
        run()
        torch.cuda.synchronize()
        first = time.monotonic() - begin
        pairs = []
        for _ in range(repeats):
            self.evict.zero_()
            torch.cuda._sleep(1_000_000)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            run()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3, first

    def row(
        self, part: str, name: str, run: Callable[[], Any], moved: float = 0.0, flops: float = 0.0
    ) -> dict[str, Any]:
        """Measure one thing; an exception becomes a row too."""
        row: dict[str, Any] = {"part": part, "name": name}
        if time.monotonic() > self.end:
            return row | {"skipped": "out of time"}
        try:
            seconds, first = self.measure(run)
        except Exception as error:
            return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
        row |= {"us": round(seconds * 1e6, 1), "first_s": round(first, 2)}
        if moved:
            row |= {"gb_per_s": round(moved / seconds / 1e9), "of_memory": round(moved / seconds / BYTES_PER_S, 3)}
        if flops:
            row |= {"tflop_per_s": round(flops / seconds / 1e12, 1), "of_peak": round(flops / seconds / FLOPS_PER_S, 3)}
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--only", default="ops,head,products,attention")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py needs an NVIDIA GPU, and torch sees none")
    torch.manual_seed(0)
    clock = Clock(time.monotonic() + arguments.seconds, torch.empty(128 << 20, dtype=torch.int32, device=CUDA))
    parts = {"ops": operations, "head": head_rows, "products": products, "attention": attention}
    rows = []
    for row in itertools.chain.from_iterable(parts[name](clock) for name in arguments.only.split(",")):
        rows.append(row)
        print(shown(row), flush=True)
    print(json.dumps(rows))
    if arguments.out is not None:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        record = {"date": datetime.date.today().isoformat(), "machine": machine, "tokens": TOKENS, "rows": rows}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


def shown(row: dict[str, Any]) -> str:
    text = f"{row['part']:10} {row['name']:44}"
    if "us" not in row:
        return text + "".join(f" {key}: {row[key]}" for key in ("skipped", "failed") if key in row)
    text += f" {row['us']:10.1f} us"
    text += f" {row['gb_per_s']:6} GB/s {row['of_memory']:6.1%}" if "gb_per_s" in row else " " * 19
    text += f" {row['tflop_per_s']:7} TFLOP/s {row['of_peak']:6.1%}" if "tflop_per_s" in row else ""
    return text + (f"   (first run {row['first_s']:.1f} s)" if row["first_s"] > 0.5 else "")


def random(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16).requires_grad_(grad)


def operations(clock: Clock) -> Iterator[dict[str, Any]]:
    """Forward and backward of every operation in every implementation."""
    x, residual, gate_up = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN), random(TOKENS, 2 * INTERMEDIATE)
    qkv = random(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    weight, head_weight = (torch.ones(size, device=CUDA).requires_grad_() for size in (HIDDEN, HEAD_DIM))
    cos, sin = (random(TOKENS, HEAD_DIM // 2, grad=False) for _ in range(2))
    heads = (HEADS, KV_HEADS)
    queries, values = TOKENS * HEADS * HEAD_DIM, TOKENS * KV_HEADS * HEAD_DIM
    stream, wide = TOKENS * HIDDEN, TOKENS * INTERMEDIATE
    cases: dict[str, tuple[Callable[[Any], Any], tuple[Tensor, ...], int, int]] = {
        # name: what is run, what gets a gradient, elements moved forward and backward
        "rms_norm": (lambda ops: ops.rms_norm(x, weight, 1e-6), (x, weight), 2 * stream, 3 * stream),
        "add_rms_norm": (
            lambda ops: ops.add_rms_norm(x, residual, weight, 1e-6),
            (x, residual, weight),
            4 * stream,
            4 * stream,
        ),
        "qkv_norm_rope": (
            lambda ops: ops.qkv_norm_rope(qkv, *heads, head_weight, head_weight, 1e-6, cos, sin),
            (qkv, head_weight),
            2 * (queries + values),
            3 * (queries + values) + 2 * values,
        ),
        "swiglu": (lambda ops: ops.swiglu(gate_up), (gate_up,), 3 * wide, 5 * wide),
    }
    for implementation, make in implementations().items():
        try:
            ops = make()
        except ImportError as error:
            yield {"part": "ops", "name": implementation, "failed": f"not installed: {error}"}
            continue
        for name, (run, inputs, forward, backward) in cases.items():
            call = functools.partial(run, ops)
            yield clock.row("ops", f"{implementation} {name} forward", call, 2.0 * forward)
            yield clock.row("ops", f"{implementation} {name} backward", backward_of(call, inputs), 2.0 * backward)


def implementations() -> dict[str, Callable[[], Any]]:
    def triton() -> Any:
        from prl_models.kernels.triton_ops import TritonOps

        return TritonOps()

    def liger() -> Any:
        from prl_models.kernels.libraries import LigerOps

        return LigerOps()

    def quack() -> Any:
        from prl_models.kernels.libraries import QuackOps

        return QuackOps()

    return {"triton": triton, "liger": liger, "quack": quack, "torch": TorchOps}


def backward_of(run: Callable[[], Any], inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """A function that runs the backward pass alone; the forward pass happens at its first call."""
    state: list[Any] = []

    def backward() -> None:
        if not state:
            outputs = run()
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            state.append((outputs, [torch.randn_like(x) for x in outputs]))
        torch.autograd.grad(state[0][0], inputs, state[0][1], retain_graph=True)

    return backward


def head_rows(clock: Clock) -> Iterator[dict[str, Any]]:
    """The head whole, with logits kept and recomputed, and its kernels and products."""
    hidden = random(TOKENS, HIDDEN)
    weight = (0.02 * torch.randn(VOCABULARY, HIDDEN, device=CUDA)).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device=CUDA)
    temperatures, grad = torch.ones(TOKENS, device=CUDA), torch.rand(TOKENS, device=CUDA)
    product = 2.0 * TOKENS * HIDDEN * VOCABULARY

    def forward() -> tuple[Tensor, Tensor]:
        return head.logprobs_and_entropy(hidden, weight, targets, temperatures)

    def both(entropy: bool) -> None:
        outputs = forward() if entropy else forward()[:1]
        torch.autograd.grad(outputs, (hidden, weight), [grad] * len(outputs))

    yield clock.row("head", "forward", forward, flops=product)
    yield clock.row("head", "forward and backward", lambda: both(False), flops=3 * product)
    yield clock.row("head", "forward and backward, entropy too", lambda: both(True), flops=3 * product)
    kept, head.KEPT_BYTES = head.KEPT_BYTES, 0
    yield clock.row("head", "forward and backward, recomputed", lambda: both(False), flops=4 * product)
    head.KEPT_BYTES = kept
    yield from head_parts(clock, targets, temperatures, grad)


def head_parts(clock: Clock, targets: Tensor, temperatures: Tensor, grad: Tensor) -> Iterator[dict[str, Any]]:
    rows = 4096
    logits, hidden = random(rows, VOCABULARY, grad=False), random(rows, HIDDEN, grad=False)
    of_rows = (targets[:rows], temperatures[:rows])
    out = tuple(torch.zeros(rows, device=CUDA) for _ in range(3))
    total = torch.zeros(VOCABULARY, HIDDEN, device=CUDA)
    size = 2.0 * rows * VOCABULARY

    def gradient(entropy: bool) -> None:
        from prl_models.kernels.softmax import gradient

        gradient(logits, *of_rows, out[2], out[1], grad[:rows], grad[:rows] if entropy else None)

    def statistics_of() -> None:
        from prl_models.kernels.softmax import statistics as of_logits

        of_logits(logits, *of_rows, out)  # type: ignore[arg-type]

    yield clock.row("head", "statistics of 4,096 rows", statistics_of, size)
    yield clock.row("head", "gradient of 4,096 rows", lambda: gradient(False), 2 * size)
    yield clock.row("head", "gradient of 4,096 rows, entropy too", lambda: gradient(True), 2 * size)
    flops = 2.0 * rows * VOCABULARY * HIDDEN
    for name, sum_so_far in (("added", total), ("alone", None)):
        run = functools.partial(head._add_product, sum_so_far, logits.t(), hidden, total.dtype)
        yield clock.row("head", f"weight gradient {name}, 4,096 rows", run, flops=flops)
    added = head._adds_wider(torch.bfloat16)
    yield {"part": "head", "name": "addmm adds halves to float32", "skipped": "yes" if added else "no: one more pass"}


def products(clock: Clock) -> Iterator[dict[str, Any]]:
    """The matrix products of a layer: forward, gradient of the input, gradient of the weight."""
    shapes = {
        "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "o": (HEADS * HEAD_DIM, HIDDEN),
        "gate_up": (HIDDEN, 2 * INTERMEDIATE),
        "down": (INTERMEDIATE, HIDDEN),
    }
    for name, (inner, outer) in shapes.items():
        x, weight, grad = (random(*shape, grad=False) for shape in ((TOKENS, inner), (outer, inner), (TOKENS, outer)))
        flops = 2.0 * TOKENS * inner * outer
        runs: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, weight=weight: x @ weight.t(),  # type: ignore[misc]
            "input": lambda grad=grad, weight=weight: grad @ weight,  # type: ignore[misc]
            "weight": lambda grad=grad, x=x: grad.t() @ x,  # type: ignore[misc]
        }
        for which, run in runs.items():
            yield clock.row("products", f"{name} {which} {inner} -> {outer}", run, flops=flops)


def attention(clock: Clock) -> Iterator[dict[str, Any]]:
    """Every kernel on every mix of documents; then a row whose lengths no kernel has seen."""
    q, k, v = (random(TOKENS, heads, HEAD_DIM, grad=False) for heads in (HEADS, KV_HEADS, KV_HEADS))
    grad = random(TOKENS, HEADS, HEAD_DIM, grad=False)
    for name in KERNELS:
        try:
            kernel, _ = choose_attention(name, CUDA, torch.bfloat16, HEAD_DIM)  # type: ignore[arg-type]
        except Exception as error:
            yield {"part": "attention", "name": name, "failed": str(error)[:200]}
            continue
        for mix, lengths in MIXES.items():
            where = spans(lengths)
            flops = sum(2.0 * length * length * HEADS * HEAD_DIM for length in lengths)
            state: list[tuple[Tensor, Tensor]] = []

            def forward(kernel: Any = kernel, where: Spans = where, state: list[Any] = state) -> None:
                state[:] = [kernel.forward(q, k, v, where, HEAD_DIM**-0.5, True, None)]

            def backward(kernel: Any = kernel, where: Spans = where, state: list[Any] = state) -> None:
                kernel.backward(grad, q, k, v, *state[0], where, HEAD_DIM**-0.5, True, None)

            yield clock.row("attention", f"{name} {mix} forward", forward, flops=flops)
            yield clock.row("attention", f"{name} {mix} backward", backward, flops=2.5 * flops)
        yield unseen_lengths(clock, name, kernel, (q, k, v), grad)


def unseen_lengths(clock: Clock, name: str, kernel: Any, inputs: tuple[Tensor, ...], grad: Tensor) -> dict[str, Any]:
    """Seconds of a forward and backward pass over eight documents of new lengths: what planning and compiling cost."""
    row = {"part": "attention", "name": f"{name} eight new lengths, host and GPU"}
    if time.monotonic() > clock.end:
        return row | {"skipped": "out of time"}
    where = spans([3001, 1511, 607, 2503, 4001, 1009, 2749, 1003])
    torch.cuda.synchronize()
    begin = time.monotonic()
    try:
        state = kernel.forward(*inputs, where, HEAD_DIM**-0.5, True, None)
        kernel.backward(grad, *inputs, *state, where, HEAD_DIM**-0.5, True, None)
        torch.cuda.synchronize()
    except Exception as error:
        return row | {"failed": str(error)[:200]}
    seconds = time.monotonic() - begin
    return row | {"us": round(seconds * 1e6, 1), "first_s": round(seconds, 2)}


def spans(lengths: list[int]) -> Spans:
    assert sum(lengths) == TOKENS, sum(lengths)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=CUDA)
    return Spans(bounds, bounds, max(lengths), max(lengths))


if __name__ == "__main__":
    main()
