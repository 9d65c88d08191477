"""One rank of several: `context_ranks.py FOLDER DEVICE` computes rows together with others and writes how far it is
from one process to FOLDER/errors-RANK.json: {check: largest relative error}.

On cpu four ranks. Attention alone, in float64: ranks 0 and 1, and all four. Models, in float32: ranks 0 and 1; FOLDER
has one in each of its folders. On cuda attention alone, in bfloat16, by the kernel that is chosen there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prl.testing.numerics import relative_error
from prl_models.batch import PackedBatch
from prl_models.blocks.attention import packed_attention
from prl_models.blocks.cache import selective
from prl_models.blocks.context import ContextParallel, attend, sum_over_context
from prl_models.blocks.packing import Packing
from prl_models.kernels import choose_attention
from prl_models.options import ModelOptions
from prl_models.provider import load_model
from prl_trainer_fsdp.parallel.runtime import end
from prl_trainer_fsdp.ranks import MEETING_PLACE

DEVICE = torch.device(sys.argv[2])
ROWS = {
    "straddling": [17, 9, 22],
    "one document": [48],
    "shorter than the number of ranks": [1, 2, 1, 1, 3, 2],
    "to be padded": [13, 5, 11],
    "almost empty": [3],
    "cut at bounds": [6, 6, 12, 12, 12],
}
HEADS = {"grouped": (8, 4), "one key head": (4, 1), "copied key heads": (12, 3)}
MODEL_ROW = [11, 3, 1, 20, 6]
STYLES: Any = ("ulysses", "ring")


class Counted:
    """A kernel that counts its forward passes."""

    name = "counted"

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls = 0

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        found: tuple[Tensor, Tensor] = self.kernel.forward(*arguments)
        return found

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.kernel.backward(*arguments)
        return found


def batch_of(
    lengths: list[int], targets: np.ndarray, context: ContextParallel | None, ids: np.ndarray | None = None
) -> PackedBatch:
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    ids = np.zeros(bounds[-1], np.int32) if ids is None else ids
    return PackedBatch.build(
        ids, bounds, targets, np.ones(len(targets), np.float32), DEVICE, share=False, context=context
    )


def attention_error(
    context: ContextParallel,
    lengths: list[int],
    heads: tuple[int, int],
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, int] = (8, 6),  # values narrower than keys
) -> float:
    """Output and gradients, at once and recomputed in the backward pass, against float64 of the same values."""
    packing = batch_of(lengths, np.array([1]), context).packing
    tokens = packing.num_tokens
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]), (heads[0], widths[1])]
    generator, scale = torch.Generator().manual_seed(0), widths[0] ** -0.5 * 2.0
    given = [torch.randn(tokens, *shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    weight = given.pop()
    whole = [x.double().requires_grad_() for x in given]
    expected = packed_attention(*whole, Packing(np.append(packing.starts, tokens), DEVICE), scale, window)
    wanted = torch.autograd.grad((expected * weight).sum(), whole)
    places = torch.from_numpy(context.places(tokens)).to(DEVICE)
    part = [x[places].requires_grad_() for x in given]
    kernel = Counted(choose_attention("auto", DEVICE, dtype, widths[0])[0])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, packing, scale, window, kernel, context)

    def again(*arguments: Tensor) -> Tensor:
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=selective)

    errors = []
    for compute in (run, again):
        found = compute(*part)
        calls = kernel.calls
        got = torch.autograd.grad((found * weight[places]).sum(), part)
        assert kernel.calls == calls, "attention was computed again instead of kept"
        errors.append(relative_error(expected[places], found))
        errors += [relative_error(a[places], b) for a, b in zip(wanted, got, strict=True)]
    return max(errors)


def attention_errors(group: Any) -> dict[str, float]:
    errors = {}
    for style in STYLES:
        context = ContextParallel(group, style)
        for row, lengths in ROWS.items():
            for name, heads in HEADS.items():
                errors[f"{style} of {context.size}: {row}, {name}"] = attention_error(context, lengths, heads)
        errors[f"bfloat16 {style} of {context.size}"] = attention_error(context, [17, 31], (8, 4), None, torch.bfloat16)
    errors[f"ulysses of {context.size}: window"] = attention_error(ContextParallel(group), [17, 9, 22], (8, 4), 5)
    return errors


def model_errors(folder: Path, group: Any) -> dict[str, float]:
    """Log-probabilities, entropies and every gradient; a second time with targets in the first document alone."""
    ids = np.random.default_rng(0).integers(3, 61, sum(MODEL_ROW)).astype(np.int32)
    starts = np.cumsum([0, *MODEL_ROW])[:-1]
    every = np.setdiff1d(np.arange(len(ids)), starts)
    weights = torch.randn(2, len(ids), generator=torch.Generator().manual_seed(0))
    rows = {"all": every, "few": every[:2]}
    alone = load_model(str(folder), "auto", ModelOptions())
    expected = {name: run_model(alone, ids, targets, None, weights) for name, targets in rows.items()}
    found = {}
    for style in STYLES:
        context = ContextParallel(group, style)
        model = load_model(str(folder), "auto", ModelOptions(context=context))
        for name, targets in rows.items():
            values, gradients = run_model(model, ids, targets, context, weights)
            errors = map(relative_error, expected[name][0], values)
            found[f"{style} {folder.name}: {name} values"] = max(errors)
            errors = (relative_error(expected[name][1][key], value) for key, value in gradients.items())
            found[f"{style} {folder.name}: {name} gradients"] = max(errors)
    return found


def run_model(
    model: Any, ids: np.ndarray, targets: np.ndarray, context: ContextParallel | None, weights: Tensor
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """[T] log-probabilities and entropies, and gradients by name, summed over the ranks of the row."""
    batch = batch_of(MODEL_ROW, targets, context, ids)
    places = torch.from_numpy(targets)
    places = places if batch.mine is None else places[batch.mine]
    if context is not None and len(targets) == 2:
        assert (len(places) == 0) == (context.rank == 1), "this rank was to have no targets, or all"
    values = [sum_over_context(part.new_zeros(len(ids)).index_copy(0, places, part), context) for part in model(batch)]
    sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if context is not None:
            dist.all_reduce(gradient, group=context.group)
        gradients[name], parameter.grad = gradient, None
    return [value.detach() for value in values], gradients


def on_cpu(folder: Path) -> dict[str, float]:
    pair = dist.new_group([0, 1])
    errors = attention_errors(dist.group.WORLD)
    if dist.get_rank() < 2:
        errors |= attention_errors(pair)
        for model in sorted(path for path in folder.iterdir() if path.is_dir()):
            errors |= model_errors(model, pair)
    return errors


def on_gpus() -> dict[str, float]:
    errors = {}
    for style in STYLES:
        context = ContextParallel(dist.group.WORLD, style)
        for row in ([700, 301, 1047], [2048], [64] * 30):
            error = attention_error(context, row, (16, 8), None, torch.bfloat16, (128, 128))
            errors[f"{style}: {len(row)} documents"] = error
    return errors


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"file://{os.environ[MEETING_PLACE]}"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=place, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    errors = on_gpus() if DEVICE.type == "cuda" else on_cpu(folder)
    (folder / f"errors-{rank}.json").write_text(json.dumps(errors))
    dist.barrier()
    end(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
