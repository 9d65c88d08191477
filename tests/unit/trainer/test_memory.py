"""What is recomputed, and what lies on the host: the same bits, less memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prl.errors import ConfigError
from prl.testing.numerics import assert_parity, assert_same_bits
from prl_models.blocks.attention import Padded
from prl_models.blocks.decoder import Attention
from prl_trainer_fsdp import activations
from prl_trainer_fsdp.activations import offload_activations
from prl_trainer_fsdp.config import FsdpConfig
from prl_trainer_fsdp.memory import recompute
from prl_trainer_fsdp.optim import Optimizer
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, batches, run_config, samples, state, trained

WAYS: list[dict[str, Any]] = [
    {"recompute": kind, "offload_activations": offload}
    for kind, offload in itertools.product(("none", "selective", "full"), (False, True))
]


@pytest.mark.parametrize("impl", ["auto", "hf"])
def test_recomputing_and_offloading_change_no_bit(model: Path, tmp_path: Path, impl: str) -> None:
    expected = state(trained(run_config(model, impl=impl), tmp_path / "plain"))
    for number, way in enumerate(WAYS[1:]):
        found = trained(run_config(model, impl=impl, **way), tmp_path / str(number))
        assert_same_bits(expected, state(found), str(way))


def test_with_adapters_too(model: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"lora": {"rank": 2}}
    expected = state(trained(run_config(model, **keys), tmp_path / "plain"))
    for number, way in enumerate(WAYS[1:]):
        found = trained(run_config(model, **keys, **way), tmp_path / str(number))
        assert_same_bits(expected, state(found), str(way))


class Counted:
    """The reference kernel; `calls` counts its forward passes."""

    name = "counted"

    def __init__(self) -> None:
        self.calls = 0
        self.backward = Padded().backward

    def forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return Padded().forward(*arguments)


@pytest.mark.parametrize(("kind", "calls"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_recomputation_keeps_what_attention_returned(
    model: Path, tmp_path: Path, kind: str, calls: int
) -> None:
    trainer = Trainer(run_config(model, recompute=kind), tmp_path, CPU)
    kernel, products = Counted(), []
    attention = [m for m in trainer.learner.model.modules() if isinstance(m, Attention)]
    for module in attention:
        module.compute = dataclasses.replace(module.compute, attention=kernel)
        module.register_forward_hook(lambda *_: products.append(1))
    made = samples(1, size=1)  # no shared prefixes: what shares them goes through another function
    trainer.train(batches(made, 1, row_tokens=10_000)[0])
    assert kernel.calls == calls * len(attention)
    assert len(products) == (1 if kind == "none" else 2) * len(attention)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))


def blocks(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def gradients(model: list[nn.Module], x: Tensor) -> dict[str, Tensor]:
    stack = nn.Sequential(*model)
    stack(x).square().sum().backward()
    return {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """("out" or "back", bytes) for every region, in order."""
    log: list[tuple[str, int]] = []
    out, back = activations._Region._copy_out, activations._copy_back

    def copy_out(region: activations._Region, pinned: bool) -> None:
        log.append(("out", sum(s.here.nbytes for s in region.collected.values() if s.here is not None)))
        out(region, pinned)

    def copy_back(gone: list[Any]) -> None:
        log.append(("back", sum(saved.host.nbytes for saved in gone)))
        back(gone)

    monkeypatch.setattr(activations._Region, "_copy_out", copy_out)
    monkeypatch.setattr(activations, "_copy_back", copy_back)
    return log


def test_all_blocks_but_the_last_travel_and_come_back_once_in_turn(moved: list[tuple[str, int]]) -> None:
    x = torch.randn(16, 8, requires_grad=True)
    expected = gradients(blocks(), x)
    model = blocks()
    offload_activations(model, torch.device("cpu"))
    for _ in range(2):
        found = gradients(model, x)
        assert_same_bits(expected, found)
        nn.Sequential(*model).zero_grad()
        per_block = 16 * (8 + 32) * 4  # the input and what sigmoid saves, once although two operations save it
        assert [kind for kind, _ in moved] == ["out", "out", "back", "back"]
        assert {size for _, size in moved} == {per_block}
        moved.clear()


def test_with_recomputation_only_inputs_travel(moved: list[tuple[str, int]]) -> None:
    model = blocks()
    for block in model:
        recompute(block, "full")
    offload_activations(model, torch.device("cpu"))
    gradients(model, torch.randn(16, 8, requires_grad=True))
    assert [size for _, size in moved] == [16 * 8 * 4] * 4


def test_the_device_holds_two_blocks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = blocks(6), list[int]()
    offload_activations(model, torch.device("cpu"))
    regions: list[activations._Region] = []
    original = activations._Region.send

    def send(region: activations._Region) -> None:
        original(region)
        regions.append(region)
        alive.append(sum(any(s.here is not None for s in r.collected.values()) for r in regions))

    monkeypatch.setattr(activations._Region, "send", send)
    gradients(model, torch.randn(16, 8, requires_grad=True))
    assert alive == [1, 2, 2, 2, 2]


def test_what_changes_in_place_after_it_was_saved_is_found() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            z = y * y
            y.add_(1.0)
            return z

    model: list[nn.Module] = [Wrong(), Wrong()]
    offload_activations(model, torch.device("cpu"))
    with pytest.raises(AssertionError, match="changed in place"):
        model[0](torch.randn(4, requires_grad=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_the_state_on_the_host_changes_no_bit(
    model: Path, tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"optimizer": optimizer, "weight_decay": 0.1}
    plain = trained(run_config(model, **keys), tmp_path / "plain")
    monkeypatch.setattr("prl_trainer_fsdp.optim.optimizer.BUCKET", 4000)
    offloaded = trained(run_config(model, offload_optimizer=True, **keys), tmp_path / "offloaded")
    hosts = [unit.host for unit in offloaded.learner.optimizer._units]
    assert len(hosts) > 3 and all(host is not None and host._copy is None for host in hosts)
    assert_same_bits(state(plain), state(offloaded))
    assert_same_bits(dict(plain.learner.optimizer.named_state()), dict(offloaded.learner.optimizer.named_state()))
    offloaded.snapshot(2)
    offloaded.checkpoint(2, tmp_path / "saved")
    again = Trainer(run_config(model, **keys), tmp_path / "again", CPU)
    again.load_checkpoint(tmp_path / "saved")
    back = Trainer(run_config(model, offload_optimizer=True, **keys), tmp_path / "back", CPU)
    back.load_checkpoint(tmp_path / "saved")
    for trainer in (plain, again, back):
        trainer.train(batches(samples(3, 2), 3)[0])
    assert_same_bits(state(plain), state(again))
    assert_same_bits(state(plain), state(back))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "selective"])
def test_compiled_blocks_train_the_same_and_once_for_rows_of_any_length(model: Path, tmp_path: Path, kind: str) -> None:
    from torch._dynamo.utils import counters

    expected = state(trained(run_config(model, impl="hf"), tmp_path / "plain", 3))
    torch.compiler.reset()
    counters.clear()
    config = run_config(model, impl="hf", compile=True, recompute=kind, offload_activations=True)
    trainer, graphs = Trainer(config, tmp_path / "compiled", CPU), []
    for step in (1, 2, 3):
        trainer.train(batches(samples(step, step - 1), step)[0])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs
    for name, value in state(trainer).items():
        assert_parity(expected[name], value, 1e-4, name)


def test_compiling_what_is_fused_by_hand_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are fused already"):
        Trainer(run_config(model, compile=True), tmp_path, CPU)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Wide(nn.Module):
    """Saves 256 MiB of 8,192 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(3):
            y = torch.tanh(y)
        return x + self.down(y)


def peak(compute: Callable[[], object]) -> int:
    """Bytes that were taken at the most beyond those before."""
    torch.cuda.synchronize()
    before = int(torch.cuda.memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    compute()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("recomputed", "least"), [(False, 2.0), (True, 1.2)])
def test_activations_on_the_host_lower_the_peak_of_a_gpu(recomputed: bool, least: float) -> None:
    def model(offload: bool) -> list[nn.Module]:
        torch.manual_seed(0)
        made: list[nn.Module] = [Wide().cuda() for _ in range(16)]
        if recomputed:
            for block in made:
                recompute(block, "full")
        if offload:
            offload_activations(made, torch.device("cuda"))
        return made

    torch.manual_seed(1)
    x = torch.randn(8192, 512, device="cuda", requires_grad=True)
    kept, offloaded = model(False), model(True)
    for _ in range(2):  # the second time without what the first one sets up
        peaks = [peak(lambda made=made: gradients(made, x)) for made in (kept, offloaded)]  # type: ignore[misc]
        assert_same_bits(
            {name: p.grad for name, p in nn.Sequential(*kept).named_parameters()},
            {name: p.grad for name, p in nn.Sequential(*offloaded).named_parameters()},
        )
    assert peaks[0] > least * peaks[1], peaks


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_the_state_on_the_host_lowers_the_peak_of_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl_trainer_fsdp.optim.optimizer.BUCKET", 1 << 22)

    def made(offload: bool) -> tuple[list[nn.Linear], Callable[[], None]]:
        torch.manual_seed(0)
        layers = [nn.Linear(2048, 1024, device="cuda") for _ in range(24)]
        named = [(f"{i}.{name}", p) for i, layer in enumerate(layers) for name, p in layer.named_parameters()]
        config = FsdpConfig.model_validate({"optimizer": kind, "offload_optimizer": offload})
        optimizer = Optimizer(config, named, layers)

        def step() -> None:
            for _ in range(3):
                for _, parameter in named:
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step(1e-3)
                optimizer.zero_grad()

        return layers, step

    found = []
    for offload in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        layers, step = made(offload)
        torch.manual_seed(3)
        step()
        torch.cuda.synchronize()
        found.append((torch.cuda.memory_allocated() - before, nn.Sequential(*layers).state_dict()))
        del layers, step
    state = 24 * 2048 * 1024 * 4 * (2 if kind == "adamw" else 1)
    assert found[0][0] - found[1][0] > 0.95 * state
    assert_same_bits(found[0][1], found[1][1])
