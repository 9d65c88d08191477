"""A checkpoint of any number of ranks continues on any other, to the bit; who writes what of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from prl.testing.numerics import assert_same_bits
from prl_trainer_fsdp.checkpoint import Reader, read_index
from prl_trainer_fsdp.checkpoint.layout import Box, Owners, boxes, local

from .helpers import run_ranks


def everything(path: Path) -> dict[str, Tensor]:
    """Parameters and optimiser state, put together."""
    index = read_index(path)
    index.verify()
    with Reader(index) as reader:
        kinds = ((kind, name) for kind in ("parameter", "optimizer") for name in index.of(kind))
        return {f"{kind}/{name}": reader.whole(kind, name) for kind, name in kinds}


def test_ranks_pass_a_checkpoint_on(model: Path, tmp_path: Path) -> None:
    """2 -> 1 -> 2, and 1 -> 2 shards -> 2 that share rows -> 1: parameters and moments, and after one more step."""
    run_ranks(Path(__file__).with_name("reshard.py"), 2, str(model), str(tmp_path))
    for names in (("a", "a-b", "a-b-c"), ("a3", "a-b-c3"), ("s", "s-d", "s-d-e", "s-d-e-f"), ("s3", "s-d-e-f3")):
        first = everything(tmp_path / names[0])
        assert sum(name.startswith("optimizer/exp_avg.") for name in first) == 20
        for name in names[1:]:
            assert_same_bits(first, everything(tmp_path / name))
    held = [sum(file.stat().st_size for file in (tmp_path / "a").glob(f"rank-0000{rank}.*")) for rank in (0, 1)]
    assert max(held) < 1.2 * min(held), "each rank writes its share"
    assert len(read_index(tmp_path / "s-d-e").ranks) == 2


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """A process group that exchanges nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


SHAPES = [(16, 3), (7, 5), (1, 4), (9,), (3, 6, 2), (64, 64)]
INTERLEAVED = [Shard(0), _StridedShard(0, split_factor=2)]


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shares"),
    [
        ((4,), [Shard(0)], 4),
        ((2, 2), [Replicate(), Shard(0)], 4),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], 4),
        ((2, 2), INTERLEAVED, 4),
        ((2, 2), [Replicate(), Replicate()], 4),
    ],
    ids=str,
)
def test_every_element_is_written_once(mesh_shape: tuple[int, ...], placements: list[Placement], shares: int) -> None:
    """FSDP, HSDP, experts divided before or after FSDP, copies: uneven sizes and ranks with nothing included."""
    whole = [torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in SHAPES]
    found = [torch.full_like(tensor, -1) for tensor in whole]
    written = []
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", mesh_shape)
            owners = Owners(rank, 4)
            written.append(0)
            for tensor, into in zip(whole, found, strict=True):
                placed = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
                if not owners.is_mine(placed):
                    continue
                for box, place in boxes(placed):
                    target = into[box.within((0,) * tensor.ndim)]
                    assert (target == -1).all(), "written twice"
                    target.copy_(local(placed)[place])
                    written[-1] += box.numel
    for tensor, into in zip(whole, found, strict=True):
        assert torch.equal(tensor, into)
    assert sum(count > 0 for count in written) == (shares if placements != [Replicate(), Replicate()] else 4)


def test_copies_are_shared_out_by_size() -> None:
    sizes = [100, 60, 40, 30, 30, 20, 10, 10]
    loads = []
    for rank in range(3):
        owners = Owners(rank, 3)
        loads.append(sum(size for size in sizes if owners.is_mine(torch.empty(size))))
    assert sum(loads) == 300 and max(loads) == 100


def test_boxes_meet() -> None:
    assert Box((2, 0), (4, 8)).meet(Box((5, 3), (9, 2))) == Box((5, 3), (1, 2))
    assert Box((2, 0), (4, 8)).meet(Box((6, 0), (1, 8))) is None
    assert Box((), ()).meet(Box((), ())) == Box((), ())
