"""One rank of trainers of several: `ranks.py MODEL OUT LAYOUT...` trains `STEPS` once in every layout.

The first rank writes, into OUT/LAYOUT, `weights.safetensors` after the last step and `facts.json`: what every step
reported, the loss of an evaluation, and the log-probabilities of probes. In the first layout a checkpoint is taken
before the last step (`saved`), and `resumed.safetensors` is that step repeated from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[3]))

from prl.adapters import peft_name
from prl.errors import ConfigError, EnvironmentNotFit
from prl.messages import Correction, TrainBatch
from prl.rows import assemble
from prl.testing.numerics import assert_same_bits
from prl_trainer_fsdp.optim.optimizer import clip
from prl_trainer_fsdp.parallel import mesh
from prl_trainer_fsdp.parallel.layout import Layout
from prl_trainer_fsdp.parallel.runtime import Runtime, _check_agreement, end, start
from prl_trainer_fsdp.parallel.sharding import gather, scatter_like
from prl_trainer_fsdp.trainer import Trainer
from tests.unit.trainer.helpers import batches, run_config, samples

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp-hf": {"impl": "hf"},
    "hsdp": {"dp_replicate": 2},
    "ulysses": {"cp": 2, "recompute": "selective"},
    "ring": {"cp": 2, "cp_style": "ring", "recompute": "full"},
    "lora": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}},
    "bfloat16": {"dtype": "bfloat16", "lr": 1e-3},
    "hsdp-ring": {"dp_replicate": 2, "cp": 2, "cp_style": "ring"},
}
SETTINGS = {"lr": 3e-3, "eps": 1e-5, "schedule": "linear", "decay_steps": 10, "weight_decay": 0.1}
PROBES = [[5, 9, 3, 7], [4, 4, 8], [1, 30, 2, 17, 11]]


def updates(step: int) -> list[list[Any]]:
    """The samples of a step, by update. The second step is two updates; of the third all ranks but one have nothing."""
    made = samples(step, step - 1, surprise=4.0 if step == 4 else 1.0)
    return {2: [made[:8], made[8:]], 3: [made[:1]]}.get(step, [made])


STEPS = (1, 2, 3, 4, 5)
CORRECTIONS = {
    2: Correction("mask_tokens", 30.0),
    4: Correction("truncate", 1.5),
    5: Correction("mask_sequences", 30.0),
}
"""By step; each holds for about half of the tokens."""


def dealt(step: int, ranks: int) -> list[TrainBatch]:
    """One batch for every data-parallel rank."""
    parts = [batches(part, step, ranks) for part in updates(step)]
    for part in parts[1:]:
        for batch, more in zip(parts[0], part, strict=True):
            batch.updates += more.updates
    for batch in parts[0]:
        batch.correction = CORRECTIONS.get(step, batch.correction)
    return parts[0]


def facts(trainer: Trainer, reports: list[dict[str, float]]) -> dict[str, Any]:
    """What must be the same in every layout; collective."""
    runtime = trainer.runtime
    (update,) = dealt(1, runtime.layout.data_ranks)[runtime.data_rank].updates
    evaluated = trainer.learner.evaluate([assemble(row) for row in update.rows], update.denominators)
    return {"reports": reports, "evaluated": evaluated, "scores": trainer.learner.score(PROBES)}


def main(model: Path, out: Path, names: list[str]) -> None:
    world = int(os.environ["WORLD_SIZE"])
    first = start(run_config(model, processes=world))
    for index, name in enumerate(names):
        folder = out / name
        if first.is_leader:
            folder.mkdir()
        train(laid_out(first, name), model, name, folder, resume=index == 0)
    check_refusals(model, first)
    check_clipping(first)
    dist.barrier()
    end(0)


def check_refusals(model: Path, first: Runtime) -> None:
    """What ranks find out about one another before they train, and about the groups that they made."""
    config = run_config(model, processes=first.world, seed=int(first.rank == 1))
    with pytest.raises(
        ConfigError, match=f"of {first.world} ranks, 1 were started with another configuration than rank 0"
    ):
        _check_agreement(config, first.world, first.device)
    layout = Layout(1, first.world, 1, 2)
    meshes = mesh.make(layout, first.rank, "cpu", "ulysses")
    assert meshes.experts is not None and meshes.experts.mesh_dim_names == ("dp_replicate", "ep_shard", "ep")
    assert list(meshes.experts.get_coordinate() or ()) == [0, first.rank // 2, first.rank % 2]
    with pytest.raises(EnvironmentNotFit, match=f"rank {first.rank}: the group 'shard' is"):
        mesh._check(meshes, dataclasses.replace(layout, dp_shard=2 * first.world), first.rank)


def check_clipping(first: Runtime) -> None:
    """One norm of gradients that are sharded over all ranks, sharded in two copies, and not at all."""
    layouts = (Layout(1, first.world), Layout(2, first.world // 2))
    meshes = [mesh.make(layout, first.rank, "cpu", "ulysses").shard for layout in layouts]
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(5, 3, generator=generator) for _ in range(3)]
    parameters = [torch.nn.Parameter(torch.zeros(5, 3))]
    for over in meshes:
        places = [*[Replicate()] * (over.ndim - 1), Shard(0)]
        parameters.append(torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), over, places, src_data_rank=None)))
    for parameter, gradient in zip(parameters, whole, strict=True):
        parameter.grad = scatter_like(gradient.clone(), parameter)
    expected = torch.cat(whole).norm()
    torch.testing.assert_close(clip(parameters, 1.0), expected)
    for parameter, gradient in zip(parameters, whole, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gather(parameter.grad), gradient / expected)


def configured(model: Path, name: str, world: int) -> Any:
    own = dict(LAYOUTS[name])
    own.update({"dp_replicate": 1, "cp": 1} if world == 1 else {"processes": world})
    return run_config(model, **{**SETTINGS, **own})


def laid_out(first: Runtime, name: str) -> Runtime:
    return first.laid_out(configured(Path("none"), name, first.world).trainer.plugin_config())


def train(runtime: Runtime, model: Path, name: str, folder: Path, *, resume: bool) -> None:
    config = configured(model, name, runtime.world)
    trainer = Trainer(config, folder, runtime)
    for parameter in trainer.learner.model.parameters():  # no rank holds more than its part, padded to equal parts
        part = -(-parameter.shape[0] // runtime.layout.shards) * parameter[0].numel()
        assert parameter.to_local().untyped_storage().nbytes() <= 4 * part, parameter.shape
    reports = []
    for step in STEPS:
        if resume and step == STEPS[-1]:
            trainer.snapshot(step - 1)
            trainer.checkpoint(step - 1, folder / "saved")
            dist.barrier()
        metrics = trainer.train(mine(runtime, step)).metrics
        reports.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
    weights = whole(trainer)
    found = facts(trainer, reports)
    reference = trainer.publish(STEPS[-1])
    assert reference.version == STEPS[-1], reference  # every rank knows where it is
    if config.trainer.plugin_config().adapter is not None:  # whole on every rank, as an engine would get them
        adapters = {peft_name(parameter): value for parameter, value in weights.items()}
        assert_same_bits(adapters, dict(trainer.learner.adapter_tensors()))
    if runtime.is_leader:
        save_file(weights, folder / "weights.safetensors")
        (folder / "facts.json").write_text(json.dumps(found))
    if resume:
        again = Trainer(config, folder / "again", runtime)
        again.load_checkpoint(folder / "saved")
        again.train(mine(runtime, STEPS[-1]))
        resumed = whole(again)
        if runtime.is_leader:
            save_file(resumed, folder / "resumed.safetensors")


def mine(runtime: Runtime, step: int) -> TrainBatch:
    """As the controller sends it: samples to the first of the ranks that share rows alone."""
    batch = dealt(step, runtime.layout.data_ranks)[runtime.data_rank]
    if runtime.context_rank:
        batch.updates = []
    return batch


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: gather(p.detach()).clone() for name, p in trainer.learner.parameters()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
