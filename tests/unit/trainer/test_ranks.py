"""Several processes train what one does, however they are laid out: sharded, replicated, sharing rows; with uneven
work, idle ranks, several updates of a batch; also as two nodes that meet as torchrun's do."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from prl.testing.numerics import assert_parity, assert_same_bits
from prl_trainer_fsdp.checkpoint import read_index
from prl_trainer_fsdp.trainer import Trainer

from .helpers import CPU, run_ranks, state
from .ranks import STEPS, configured, dealt, facts

TOLERANCE = 5e-6
OTHERS = {"lora": 2e-5, "bfloat16": 0.02}
"""B of an adapter starts at 0: its size is what five steps of Adam made of gradients that differ by 1e-7."""
SCRIPT = Path(__file__).with_name("ranks.py")

Result = tuple[dict[str, torch.Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """What one process makes of a layout's settings."""

    @functools.cache
    def trained(name: str) -> Result:
        trainer = Trainer(configured(model, name, 1), tmp_path_factory.mktemp("single"), CPU)
        reports = [trainer.train(dealt(step, 1)[0]).metrics for step in STEPS]
        return state(trainer), facts(trainer, reports)

    return lambda name: trained(name if name in OTHERS else "fsdp")


def assert_equal(single: Result, folder: Path, tolerance: float = TOLERANCE) -> None:
    weights, expected = single
    found = load_file(folder / "weights.safetensors")
    assert found.keys() == weights.keys()
    for name, parameter in weights.items():
        assert_parity(parameter, found[name], tolerance, f"{folder.name}: {name}")
    several = json.loads((folder / "facts.json").read_text())
    pairs = zip([*expected["reports"], expected["evaluated"]], [*several["reports"], several["evaluated"]], strict=True)
    for index, (one, other) in enumerate(pairs):
        assert other.keys() == one.keys()
        for name, value in one.items():
            near = pytest.approx(value, rel=2 * tolerance, abs=0.02 * tolerance)
            assert other[name] == near, f"{folder.name}: {index}: {name}"
    for one, other in zip(expected["scores"], several["scores"], strict=True):
        assert other == pytest.approx(one, abs=2 * tolerance), folder.name


def test_two_nodes_of_one_rank_equal_one_process(model: Path, tmp_path: Path, single: Callable[[str], Result]) -> None:
    """FSDP, HSDP, Ulysses and ring over two ranks, each started by itself with torchrun's variables."""
    names = ["fsdp", "fsdp-hf", "hsdp", "ulysses", "ring", "lora", "bfloat16"]
    with meeting_place() as port:
        nodes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(model), str(tmp_path), *names],
                env={**os.environ, **torchrun(node, 2, port)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(2)
        ]
        try:
            said = [node.communicate(timeout=240)[1] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(text[-6000:] for text in said)
    for name in names:
        assert_equal(single(name), tmp_path / name, OTHERS.get(name, TOLERANCE))
    # A checkpoint of several ranks continues there to the bit, and in one process.
    assert_same_bits(load_file(tmp_path / "fsdp/weights.safetensors"), load_file(tmp_path / "fsdp/resumed.safetensors"))
    alone = Trainer(configured(model, "fsdp", 1), tmp_path / "alone", CPU)
    alone.load_checkpoint(tmp_path / "fsdp" / "saved")
    assert alone.version == STEPS[-2]
    alone.train(dealt(STEPS[-1], 1)[0])
    for name, parameter in single("fsdp")[0].items():
        assert_parity(parameter, state(alone)[name], TOLERANCE, name)


def test_four_ranks_equal_one_process(model: Path, tmp_path: Path, single: Callable[[str], Result]) -> None:
    """dp2 x cp2 with Ulysses, two copies of two shards, two copies of one ring."""
    names = ["hsdp", "ulysses", "hsdp-ring"]
    run_ranks(SCRIPT, 4, str(model), str(tmp_path), *names)
    for name in names:
        assert_equal(single(name), tmp_path / name)
    # What two copies hold is written once, by both of them, and read by all.
    assert_same_bits(load_file(tmp_path / "hsdp/weights.safetensors"), load_file(tmp_path / "hsdp/resumed.safetensors"))
    index = read_index(tmp_path / "hsdp" / "saved")
    assert [bool(held.tensors["parameter"]) for held in index.ranks] == [True] * 4


@contextlib.contextmanager
def meeting_place() -> Iterator[int]:
    """The port of a store as torchrun's agent holds one, on loopback."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port: int = listening.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        yield port
        del store


def torchrun(node: int, nodes: int, port: int) -> dict[str, str]:
    """What torchrun sets for the only rank of a node."""
    numbers = {"RANK": node, "WORLD_SIZE": nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }
